"""How results are written: numbers for tables, one JSON line for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chairlift.lab.bench.workload_options import WorkloadOptions


def number(value: float) -> str:
    """Three or more significant digits, without an exponent."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def json_line(record: Mapping[str, Any]) -> str:
    """The record on one line, newline included. It is standard JSON: infinities become the strings inf and -inf, and
    paths strings."""
    return json.dumps(_plain(record), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def load_arrivals(options: WorkloadOptions) -> str:
    """When the requests of a load come, for a title."""
    if options.request_rate is None:
        text = "at once" if options.trace is None else "when the trace says"
    else:
        text = "at once" if options.request_rate == math.inf else f"at {options.request_rate:g}/s"
    return text if options.max_concurrency is None else f"{text}, {options.max_concurrency} at a time"


def load_lengths(options: WorkloadOptions) -> str:
    """What the requests of a load are, for a caption."""
    if options.trace is not None:
        lengths = f"trace {options.trace}"
    else:
        lengths = f"prompt {options.input_len}, output {options.output_len}"
    declared = "" if options.max_tokens is None else f", max_tokens {options.max_tokens}"
    return f"{lengths}{declared}, seed {options.seed}"
