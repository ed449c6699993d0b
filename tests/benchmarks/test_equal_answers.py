"""benchmarks/equal_answers.py: its calls and what it replaces. `test_comparisons_of_servers.py` runs it."""

from __future__ import annotations

import json

from benchmarks.equal_answers import Comparison, RandomCall, make_calls, normalized

CALL = RandomCall("/v1/completions", {"prompt": "x"}, frozenset({"text"}))
KINDS = {"list of prompts", "n > 1", "beams", "stream", "truncated", "logprobs", "prompt_logprobs", "stop_token_ids"}


def chunk(index: int, text: str, reason: str | None = None, **fields: object) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": reason, "logprobs": {"tokens": [text]}}
    return b"data: " + json.dumps({"id": "1", "choices": [choice], **fields}).encode() + b"\n\n"


def test_the_calls_are_those_of_the_seed_and_of_all_kinds() -> None:
    calls = make_calls(300, 1)
    assert calls == make_calls(300, 1)
    assert calls != make_calls(300, 2)
    kinds = set().union(*(call.kinds for call in calls))
    assert kinds > KINDS
    assert all("seed" in call.body for call in calls)
    assert any(len(set(ids)) < len(ids) for call in calls if (ids := call.body.get("stop_token_ids")))


def test_ids_and_times_are_no_difference_and_all_else_is() -> None:
    first = normalized(200, b'{"id":"a","created":5,"text":"x","usage":{"cached_tokens":3}}')
    assert first == normalized(200, b'{"id":"b","created":6,"text":"x","usage":{"cached_tokens":0}}')
    assert first != normalized(200, b'{"id":"a","created":5,"text":"y","usage":{"cached_tokens":3}}')
    assert first != normalized(400, b'{"id":"a","created":5,"text":"x","usage":{"cached_tokens":3}}')


def test_chunks_of_a_stream_are_joined() -> None:
    done = b"data: [DONE]\n\n"
    one = chunk(0, "ab") + chunk(1, "c") + chunk(0, "d", "stop") + done
    other = chunk(1, "c") + chunk(0, "abd", "stop") + done
    joined = normalized(200, one)
    assert json.loads(joined[4:])["choices"][0]["text"] == "abd"
    assert json.loads(joined[4:])["choices"][0]["logprobs"] == {"tokens": ["ab", "d"]}
    assert json.loads(joined[4:])["choices"][0]["finish_reason"] == "stop"
    assert json.loads(normalized(200, other)[4:])["choices"][0]["text"] == "abd"
    assert joined != normalized(200, one.removesuffix(done)), "a stream without its end differs"


def test_repeated_texts_of_a_stream_are_all_kept() -> None:
    text = json.loads(normalized(200, chunk(0, "a") * 3)[4:])["choices"][0]["text"]
    assert text == "aaa"


def test_differences_are_counted_by_kind() -> None:
    comparison = Comparison()
    comparison.add(CALL, b"200 same", b"200 same")
    comparison.add(CALL, b"200 one", b"200 other")
    assert comparison.figures()["kinds"] == {"all": [2, 1], "text": [2, 1]}
    assert comparison.figures()["differences"][0]["answers"] == ["200 one", "200 other"]
