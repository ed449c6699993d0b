"""Readers of traces: the requests of each format, skipped requests, and errors that name the line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import synthetic_tokens
from chairlift.lab.workload.traces import FORMATS, TraceOptions, detect_trace_format, read_trace
from chairlift.slo import SLO

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-16 18:15:51.2225670,0,55\r
2023-11-16 18:15:47.0000000,8,1\r
2023-11-16 18:15:53.9000000,91,0"""

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,0,1087,API log
118,ChatGPT,417,276,693,Conversation log
"""

MOONCAKE = """{"timestamp": 27482, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 27482, "input_length": 1100, "output_length": 26, "hash_ids": [46, 47, 2354]}

{"timestamp": 30535, "input_length": 700, "output_length": 1, "hash_ids": [46, 47]}
{"timestamp": 30600, "input_length": 700, "output_length": 0, "hash_ids": [46, 47]}
{"timestamp": 30600, "input_length": 700, "output_length": 9, "hash_ids": [46]}
"""


def words(text: str) -> list[int]:
    """Tokenizes a text into one token for each word, the length of the word."""
    return [len(word) for word in text.split()]


def text_of(number: int) -> str:
    return " ".join(["word"] * number)


def conversation(*turns: tuple[str, int]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": role, "value": text_of(number)} for role, number in turns]}


SHAREGPT = [
    conversation(("human", 10), ("gpt", 20), ("human", 5), ("gpt", 6)),
    conversation(("human", 10)),
    conversation(("human", 3), ("gpt", 20)),
    conversation(("gpt", 9), ("human", 7), ("gpt", 8)),
    conversation(("human", 1025), ("gpt", 20)),
    conversation(("user", 1024), ("assistant", 1024)),
    conversation(("human", 1024), ("gpt", 1025)),
]


class LoadedTrace(NamedTuple):
    format: str
    requests: list[WorkloadRequest]
    num_skipped: int


def load(folder: Path, text: str, **options: Any) -> LoadedTrace:
    path = folder / "trace"
    path.write_text(text, newline="")
    requests = read_trace(path, TraceOptions(**options))
    name = detect_trace_format(path)
    num_skipped = sum(request is None for request in FORMATS[name](path, TraceOptions(**options)))
    return LoadedTrace(name, requests, num_skipped)


def lens(trace: LoadedTrace) -> list[tuple[float, int, int]]:
    return [(r.arrival, len(r.prompt_token_ids), r.output_len) for r in trace.requests]


def test_azure(tmp_path: Path) -> None:
    trace = load(tmp_path, AZURE)
    assert trace.format == "azure"
    assert lens(trace) == [(0.0, 374, 44), (0.31941, 8, 1), (4.314579, 396, 109)]
    assert trace.num_skipped == 2
    assert [r.request_id for r in trace.requests] == ["azure-0", "azure-3", "azure-1"]


def test_azure_accepts_time_zones_and_fewer_digits(tmp_path: Path) -> None:
    """The format of the traces of 2024."""
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01,2,5\n"
    assert lens(load(tmp_path, text)) == [(0.0, 2162, 5), (0.99007, 2, 5)]


def test_burstgpt(tmp_path: Path) -> None:
    trace = load(tmp_path, BURSTGPT)
    assert trace.format == "burstgpt"
    assert lens(trace) == [(0.0, 472, 18), (113.0, 417, 276)]
    assert trace.num_skipped == 1


def test_mooncake_prompts_share_blocks_with_equal_ids(tmp_path: Path) -> None:
    trace = load(tmp_path, MOONCAKE)
    assert trace.format == "mooncake"
    assert lens(trace) == [(0.0, 1300, 52), (0.0, 1100, 26), (3.053, 700, 1), (3.118, 700, 9)]
    assert trace.num_skipped == 1
    a, b, c, d = (bytes(r.prompt_token_ids) for r in trace.requests)
    assert a[:1024] == b[:1024]
    assert a[1024:1040] != b[1024:1040]
    assert c == a[:700]
    assert d[:512] == a[:512]
    assert d[512:528] != a[512:528]


def test_mooncake_rejects_another_number_of_blocks(tmp_path: Path) -> None:
    line = json.dumps({"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]})
    with pytest.raises(ConfigError, match=r"line 1: hash_ids has 3 blocks of 512 tokens for an input_length of 40"):
        load(tmp_path, line)


def test_sharegpt_first_turns(tmp_path: Path) -> None:
    trace = load(tmp_path, json.dumps(SHAREGPT), tokenize=words)
    assert trace.format == "sharegpt"
    assert lens(trace) == [(0.0, 10, 20), (0.0, 7, 8), (0.0, 1024, 1024)]
    assert trace.num_skipped == 4
    assert trace.requests[0].prompt_token_ids == [4] * 10


def test_custom(tmp_path: Path) -> None:
    lines = [{"prompt": text_of(3), "output_tokens": 7}, {"prompt": "", "output_tokens": 3}]
    trace = load(tmp_path, "\n".join(map(json.dumps, lines)), tokenize=words)
    assert trace.format == "custom"
    assert lens(trace) == [(0.0, 3, 7)]
    assert trace.num_skipped == 1
    with pytest.raises(ConfigError, match="line 1: Object missing required field `output_tokens`"):
        load(tmp_path, json.dumps({"prompt": text_of(2)}), tokenize=words)


def rows(*lines: dict[str, Any]) -> str:
    return "\n".join(json.dumps({"arrival": 0, "prompt_len": 3, "output_len": 2} | line) for line in lines)


def test_chairlift_format(tmp_path: Path) -> None:
    text = rows(
        {"arrival": 3.5, "request_id": "b", "max_tokens": 9, "priority": -1, "slo": {"ttft_ms": 500}, "tenant": "t"},
        {"arrival": 1.25, "request_id": "a", "prompt_len": None, "prompt_token_ids": [700, 3], "e2e_latency": 1.0},
        {"arrival": 2},
    )
    a, d, b = load(tmp_path, text).requests
    assert a == WorkloadRequest("a", 0.0, [700, 3], 2)
    assert (d.request_id, d.arrival) == ("chairlift-2", 0.75)
    assert (b.arrival, b.max_tokens, b.priority, len(b.prompt_token_ids)) == (2.25, 9, -1, 3)
    assert (b.tenant, b.slo, d.tenant, d.slo) == ("t", SLO(500), "", None)


def test_chairlift_format_shares_hashed_blocks(tmp_path: Path) -> None:
    text = rows(
        {"prompt_len": 40, "prompt_hashes": ["x", "y"]},
        {"prompt_len": 40, "prompt_hashes": ["x", "y"]},
        {"prompt_len": 32, "prompt_hashes": ["x", "z"]},
        {"prompt_len": 9, "prompt_hashes": ["x", "y"], "hash_block_size": 4},
    )
    a, b, c, d = (bytes(r.prompt_token_ids) for r in load(tmp_path, text).requests)
    assert a[:32] == b[:32]
    assert a[32:] != b[32:]
    assert c[:16] == a[:16]
    assert c[16:] != a[16:32]
    assert len(d) == 9


LINES = {
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "mooncake": MOONCAKE,
    "sharegpt": json.dumps(SHAREGPT),
    "custom": json.dumps({"prompt": text_of(3), "output_tokens": 7})
    + "\n"
    + json.dumps({"prompt": "a", "output_tokens": 1}),
    "chairlift": rows({}, {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_detected_limited_and_within_the_vocabulary(tmp_path: Path, name: str) -> None:
    trace = load(tmp_path, "\ufeff" + LINES[name], tokenize=words, vocab_size=10)
    assert trace.format == name
    assert len(load(tmp_path, LINES[name], tokenize=words, limit=1).requests) == 1
    assert max(max(r.prompt_token_ids) for r in trace.requests) < 10


def test_number_of_skipped_requests_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace"
    path.write_text(AZURE)
    with caplog.at_level(logging.WARNING, "chairlift"):
        assert len(read_trace(path)) == 3
    assert "skipped 2 of 5 requests" in caplog.text


def test_long_trace_has_compact_and_distinct_prompts(tmp_path: Path) -> None:
    lines = [f"{i},GPT-4,{500 + i % 1000},5,0,API log" for i in range(3000)]
    trace = load(tmp_path, "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "\n".join(lines))
    assert all(type(r.prompt_token_ids) is bytes for r in trace.requests)
    assert len({bytes(r.prompt_token_ids[:16]) for r in trace.requests}) == 3000


@given(st.text(max_size=8), st.text(max_size=8), st.integers(0, 300), st.integers(1, 400))
def test_synthetic_tokens(key: str, other: str, count: int, vocab_size: int) -> None:
    tokens = synthetic_tokens(key, count, vocab_size)
    assert len(tokens) == count
    assert all(token < vocab_size for token in tokens)
    assert synthetic_tokens(key, count + 5, vocab_size)[:count] == tokens
    if key != other:
        assert synthetic_tokens(key, 16) != synthetic_tokens(other, 16)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"trace: not a trace in a known format; it starts with ''. The first line needs .*; custom: prompt"),
        ("a,b\n1,2", r"it starts with 'a,b'"),
        ("prompt,completion\na,b", r"not a trace in a known format"),
        ("timestamp,input_length,output_length\n0,1,2", r"not a trace in a known format"),
        ('{"x": 1}', r"not a trace in a known format"),
        ('{"TIMESTAMP": 0, "ContextTokens": 1, "GeneratedTokens": 2}', r"not a trace in a known format"),
        ('{"x": 1', r"the first line is not a JSON object"),
        (AZURE.replace("396", "many"), r"trace: line 3: Expected `int`, got `str` - at `.*, in 2023.*many"),
        (AZURE.replace("396", "-4"), r"line 3: Expected `int` >= 0 - at `\$.ContextTokens`"),
        (AZURE.replace("396,109", "396"), r"line 3: Object missing required field `GeneratedTokens`"),
        (AZURE.replace("2023-11-16 18:15:47", "noon"), r"line 5: Invalid isoformat string: 'noon.0000000'"),
        (AZURE.replace("2023", "1923"), r"line 2: .*arrival must be a number of seconds >= 0"),
        (BURSTGPT.replace("45.5", "nan"), r"line 3: .*(>= 0|nan)"),
        (BURSTGPT.replace("45.5", "x"), r"line 3: Expected `float`, got `str` - at `\$.Timestamp`"),
        ("Timestamp,Request tokens,Response tokens\n", r"no request can be served \(0 skipped\) when read as burstgpt"),
        (MOONCAKE.replace("1100", '"1100"'), r"line 2: Expected `int`, got `str` - at `\$.input_length`"),
        (MOONCAKE.replace("[46, 47, 2354]", '["46"]'), r"line 2: Expected `int`, got `str` - at `\$.hash_ids"),
        (MOONCAKE + "nonsense", r"line 7: JSON is malformed: .*, in nonsense"),
        (MOONCAKE + "[]", r"line 7: Expected `object`, got `array`"),
        ("[", r"trace: Input data was truncated"),
        ("[1]", r"trace: Expected `object`, got `int` - at `\$\[0\]`"),
        ('[{"id": 1}]', r"missing required field `conversations` - at `\$\[0\]`"),
        ('[{"conversations": [{"from": "human"}]}]', r"missing required field `value` - at `.*conversations"),
        ('{"prompt": 3, "output_tokens": 1}', r"line 1: Expected `str`, got `int` - at `\$.prompt`"),
        (rows({}, {"max_token": 3}), r"line 2: Object contains unknown field `max_token`"),
        (rows({}, {"output_len": 0}), r"line 2: Expected `int` >= 1 - at `\$.output_len`"),
        (rows({"max_tokens": 1}), r"line 1: workload request 'chairlift-0': max_tokens must be at least output_len=2"),
        (rows({"prompt_len": None}), r"line 1: prompt_len or prompt_token_ids must be given, and not both"),
        (rows({"prompt_token_ids": [1]}), r"line 1: prompt_len or prompt_token_ids must be given, and not both"),
        (rows({"prompt_len": 0}), r"line 1: workload request .* at least one token"),
        (rows({"prompt_len": None, "prompt_token_ids": [-1]}), r"Expected `int` >= 0 - at `\$.prompt_token_ids\[0\]`"),
        (
            rows({"prompt_hashes": ["a"]}),
            r"prompt_hashes must have one item for each full block of 16 tokens: 0, got 1",
        ),
        (rows({"hash_block_size": 4}), r"hash_block_size requires prompt_hashes"),
        (rows({"slo": {"ttft_ms": 0}}), r"line 1: slo.ttft_ms must be a number of milliseconds above 0"),
        (rows({"priority": 1.5}), r"Expected `int \| null`, got `float` - at `\$.priority`"),
        (rows({"request_id": "a"}, {"request_id": "a"}), r"request id 'a' occurs more than once"),
    ],
)
def test_invalid_files_are_rejected_with_their_place(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path, text, tokenize=words)


def test_unreadable_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: cannot be read \(No such file"):
        read_trace(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary: is not UTF-8 text"):
        read_trace(tmp_path / "binary")


def test_invalid_options_are_rejected(tmp_path: Path) -> None:
    for name in ("limit", "vocab_size"):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
            TraceOptions(**{name: 0})
    with pytest.raises(ConfigError, match="this trace contains text, so a tokenizer is required"):
        load(tmp_path, json.dumps(SHAREGPT))
