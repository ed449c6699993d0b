"""Fields of completions: echo, timings, token ids, and invalid values."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.server.api.logprobs import MIN_LOGPROB, LogprobWriter, TextOffsets
from support.running_server import RunningServer

PROMPT = "The quick brown"


def complete(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 5, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_echo_returns_the_prompt_before_the_answer(api_server: RunningServer) -> None:
    text = complete(api_server)["choices"][0]["text"]
    echoed = complete(api_server, echo=True, logprobs=1)["choices"][0]
    assert echoed["text"] == PROMPT + text
    logprobs = echoed["logprobs"]
    (bos, *rest) = logprobs["tokens"]
    assert (bos, logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == ("<bos>", None, None)
    assert "".join(rest).startswith(PROMPT)
    lengths = [len(token) for token in rest]
    assert len(logprobs["text_offset"]) == len(logprobs["tokens"])
    begins = [0, 0, *itertools.accumulate(lengths)]
    of_prompt = [begin for begin in begins if begin < len(PROMPT)]
    assert logprobs["text_offset"][: len(of_prompt)] == of_prompt, "BOS is not in the text"


def test_text_offsets_refer_to_the_text(api_server: RunningServer) -> None:
    """Characters of several tokens, token ids instead of texts, and special tokens, with and without streaming."""
    for prompt, more in (
        ("日本 🎉 a", {}),
        ("日本 🎉 a", {"return_tokens_as_token_ids": True}),
        ("a<eos>日", {"skip_special_tokens": False}),
        (api_server.llm.engine.tokenizer.encode("a<|tool|>b日"), {}),
    ):
        fields = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 9, **more}
        fields["structured_outputs"] = {"regex": "[a-z日é]{30}"}
        choice = complete(api_server, **fields, return_token_ids=True)["choices"][0]
        num_hidden = int(isinstance(prompt, str))
        prompt_ids, text = choice["prompt_token_ids"][num_hidden:], choice["text"]
        spelled = [api_server.llm.engine.tokenizer.token_bytes(token) for token in prompt_ids + choice["token_ids"]]
        expected = [len(b"".join(spelled[:index]).decode(errors="ignore")) for index in range(len(spelled))]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == [0] * num_hidden + expected
        assert b"".join(spelled).decode(errors="replace") == text
        lines = api_server.post("/v1/completions", {**fields, "temperature": 0, "stream": True}).text.splitlines()
        logprobs = (json.loads(line[6:])["choices"][0]["logprobs"] for line in lines if line.startswith("data: {"))
        assert [offset for lists in logprobs if lists for offset in lists["text_offset"]] == offsets


@given(st.text(max_size=12), st.lists(st.integers(1, 4), max_size=30))
def test_a_token_has_the_offset_of_its_character(text: str, sizes: list[int]) -> None:
    data = text.encode()
    cuts = [0, *(at for at in itertools.accumulate(sizes) if at < len(data)), len(data)]
    tokens = dict(enumerate([data[begin:end] for begin, end in itertools.pairwise(cuts)], start=1)) | {0: b"<bos>"}
    decoder = SimpleNamespace(token_bytes=tokens.__getitem__)
    whole = [len(data[:begin].decode(errors="ignore")) for begin in cuts[:-1]]
    of_prompt = TextOffsets.for_prompt(decoder, sorted(tokens), text)
    assert [of_prompt.advance(token) for token in sorted(tokens)] == [0, *whole]
    hiding = TextOffsets(decoder, 7, hidden={0})
    assert [hiding.advance(token) for token in [*sorted(tokens), 0]] == [7, *(7 + at for at in whole), 7 + len(text)]


def test_echo_with_max_tokens_0_generates_no_tokens(api_server: RunningServer) -> None:
    body = complete(api_server, echo=True, max_tokens=0, logprobs=0)
    (choice,) = body["choices"]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]


def test_beam_search_returns_the_best_answers_first(api_server: RunningServer) -> None:
    fields = {"max_tokens": 6, "ignore_eos": True, "logprobs": 0, "length_penalty": 0.5, "early_stopping": "never"}
    body = complete(api_server, n=4, use_beam_search=True, **fields)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in body["choices"]]
    assert scores == sorted(scores, reverse=True)
    assert len({choice["text"] for choice in body["choices"]}) > 1
    (greedy,) = complete(api_server, **{name: fields[name] for name in ("max_tokens", "ignore_eos", "logprobs")})[
        "choices"
    ]
    assert scores[0] >= sum(greedy["logprobs"]["token_logprobs"])
    assert body["usage"]["completion_tokens"] == 4 * 6


def test_a_stop_token_is_omitted_from_the_text_by_default(api_server: RunningServer) -> None:
    whole = complete(api_server, ignore_eos=True, return_token_ids=True)["choices"][0]
    stop = whole["token_ids"][-1]
    first = whole["token_ids"].index(stop)
    hidden = complete(api_server, stop_token_ids=[stop], ignore_eos=True, return_token_ids=True)["choices"][0]
    shown = complete(api_server, stop_token_ids=[stop], ignore_eos=True, include_stop_str_in_output=True)["choices"][0]
    assert hidden["token_ids"] == whole["token_ids"][: first + 1]
    assert hidden["stop_reason"] == shown["stop_reason"] == stop
    assert len(shown["text"]) > len(hidden["text"])


def test_timings_are_returned_in_the_body_and_as_a_header(api_server: RunningServer) -> None:
    response = api_server.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "timings": True, "ignore_eos": True}
    )
    timings = response.json()["timings"]
    assert set(timings) == {"queue", "prefill", "decode", "prompt_tokens_per_second", "output_tokens_per_second"}
    assert timings["output_tokens_per_second"] == pytest.approx(4 / timings["decode"])
    spans = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert float(spans["decode"]) == pytest.approx(1000 * timings["decode"], abs=0.06)
    assert "server-timing" not in api_server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}).headers


@pytest.mark.parametrize(
    ("fields", "param", "expected"),
    [
        ({"best_of": 3, "n": 2}, "best_of", "best_of must be at most n=2, got 3: answers are not ranked"),
        ({"use_beam_search": True, "n": 2, "stream": True}, "use_beam_search", "cannot be streamed"),
        ({"length_penalty": 2.0}, "length_penalty", "needs use_beam_search"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"suffix": "x"}, "suffix", "got 'x'"),
        ({"service_tier": "unknown"}, "service_tier", "got 'unknown'"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"messages": []}, "messages", "unknown"),
    ],
)
def test_invalid_fields_are_rejected(
    api_server: RunningServer, fields: dict[str, Any], param: str, expected: str
) -> None:
    response = api_server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert expected in response.json()["error"]["message"]


def test_max_tokens_null_is_the_default(api_server: RunningServer) -> None:
    fields = {"prompt": PROMPT, "ignore_eos": True}
    for limit in ({"max_tokens": None}, {}, {"max_tokens": None, "echo": True}):
        answer = api_server.post("/v1/completions", {**fields, **limit}).json()
        assert answer["usage"]["completion_tokens"] == 16


def test_tokenize_takes_a_prompt_or_messages(api_server: RunningServer) -> None:
    for body, param in [({}, "prompt"), ({"prompt": "x", "tools": []}, "tools")]:
        response = api_server.post("/tokenize", body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert api_server.post("/detokenize", {"tokens": [9999]}).status_code == 400


def test_minus_infinity_becomes_a_number() -> None:
    from chairlift.outputs import Logprob, TokenLogprobs

    class Letters:
        def token_bytes(self, token_id: int) -> bytes:
            return bytes([token_id])

        def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
            raise NotImplementedError

    position = TokenLogprobs(Logprob(65, float("-inf"), 9), [Logprob(200, -0.5, 1)])
    entry = LogprobWriter(Letters(), as_token_ids=False).chat(position)
    assert (entry["token"], entry["logprob"]) == ("A", MIN_LOGPROB)
    assert entry["top_logprobs"] == [{"token": "bytes:\\xc8", "logprob": -0.5, "bytes": [200]}]
