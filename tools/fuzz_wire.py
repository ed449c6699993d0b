"""Fuzz target for data from the network: lines of batch files."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from chairlift.server.batch.batch_files import BatchLineError, BatchRequestInput, parse_request
from tools.fuzz_targets import JSON, Target, altered, damaged, deep


def wire_targets() -> list[Target]:
    """Return all targets for data from the network."""
    return [_batch_target()]


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
