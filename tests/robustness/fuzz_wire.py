"""Fuzz targets for data from the network: the stream of a server, read by our client, and lines of batch files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fuzz_targets import JSON, Target, altered, damaged, deep
from hypothesis import strategies as st

from chairlift.lab.bench.serving.http_client import EventLines, RequestRecord, StreamError, error_message, record_chunk
from chairlift.server.batch.batch_lines import BatchLineError, BatchRequestInput, parse_request

CHUNK: dict[str, Any] = {
    "id": "x",
    "choices": [{"index": 0, "text": "word", "delta": {"content": "w"}, "finish_reason": None}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    "error": None,
}


def wire_targets(folder: Path) -> list[Target]:
    """Return all targets for data from the network."""
    return [_lines_target(), _chunks_target(), _batch_target()]


def _lines_target() -> Target:
    """The payloads of a stream do not depend on the pieces in which it arrives."""
    parts = st.sampled_from([b"data: {}\n\n", b"data:[DONE]\r\n\r\n", b"\n", b": ping\n", b"data: ", b"event: x\n"])
    streams = st.lists(parts | st.binary(max_size=20), max_size=12).map(b"".join)
    cases = st.tuples(streams, st.lists(st.integers(1, 30), min_size=1, max_size=20))

    def check(case: tuple[bytes, list[int]]) -> None:
        stream, sizes = case
        lines, payloads, at, index = EventLines(), [], 0, 0
        while at < len(stream):
            size = sizes[index % len(sizes)]
            payloads += lines.feed(stream[at : at + size])
            at, index = at + size, index + 1
        whole = [line[5:].strip() for line in stream.split(b"\n")[:-1] if line.startswith(b"data:")]
        assert payloads == whole
        target.add("payloads" if whole else "nothing")

    target = Target("SSE lines", cases, check, 150)
    return target


def _chunks_target() -> Target:
    whole = json.dumps(CHUNK).encode()
    cases = (
        (altered([CHUNK]) | JSON).map(lambda chunk: json.dumps(chunk).encode())
        | damaged([whole])
        | st.binary(max_size=50)
        | st.sampled_from(deep())
    )

    def check(payload: bytes) -> None:
        call = RequestRecord("r", 1, 1, due=0.0)
        assert isinstance(error_message(payload), str)
        try:
            record_chunk(payload, 1.0, call)
        except StreamError as error:
            target.add(error.failure.kind)
        else:
            assert isinstance(call.text, str)
            assert call.num_output_tokens >= 0
            target.add("taken")

    target = Target("SSE chunks", cases, check, 200)
    return target


def _batch_target() -> Target:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    whole = json.dumps(line).encode()
    lines = (altered([line]) | JSON).map(lambda value: json.dumps(value).encode())

    def check(data: bytes) -> None:
        parsed = parse_request(data, 1)
        assert isinstance(parsed, BatchRequestInput | BatchLineError)
        target.add(type(parsed).__name__)

    target = Target(
        "batch lines", lines | damaged([whole]) | st.binary(max_size=60) | st.sampled_from(deep()), check, 100
    )
    return target
