"""Reads a trace of any format, and detects the format from the beginning of the file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest, check_ids
from chairlift.lab.workload.traces.formats import (
    AzureRow,
    BurstGPTRow,
    Requests,
    TraceOptions,
    open_text_file,
    read_chairlift,
    read_custom,
    read_lengths,
    read_mooncake,
    read_sharegpt,
)

logger = logging.getLogger("chairlift")

FORMATS: Final[dict[str, Callable[[Path, TraceOptions], Requests]]] = {
    "azure": partial(read_lengths, "azure", AzureRow),
    "burstgpt": partial(read_lengths, "burstgpt", BurstGPTRow),
    "mooncake": read_mooncake,
    "sharegpt": read_sharegpt,
    "custom": read_custom,
    "chairlift": read_chairlift,
}

COLUMNS: Final = {
    "azure": {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    "burstgpt": {"Timestamp", "Request tokens", "Response tokens"},
}
KEYS: Final = {"mooncake": {"input_length"}, "custom": {"prompt"}, "chairlift": {"arrival", "output_len"}}
"""The columns, or the keys of the first line, by which a format is detected."""


def read_trace(path: Path | str, options: TraceOptions | None = None) -> list[WorkloadRequest]:
    """Returns the requests of a trace file, whose format is detected, by recorded arrival. The first one arrives at 0.

    Requests with equal times keep the order of the file. Requests that cannot be served are skipped, and their number
    is logged: they have no prompt or output tokens (logs write failed requests in this way) or, in sharegpt, lengths
    outside the limits of `formats`.

    Raises:
        ConfigError: the file cannot be read, its format is unknown or has no sessions for a closed loop, a field is
            wrong, or no request can be served.
    """
    path, options = Path(path), options or TraceOptions()
    name = detect_trace_format(path)
    if options.closed_loop and name != "chairlift":
        needed = "closed_loop requires hashes and latencies, as in a trace of --record-trace"
        raise ConfigError(f"{needed}, got {path} in the format {name}: leave closed_loop out")
    requests: list[WorkloadRequest] = []
    num_skipped = 0
    for request in FORMATS[name](path, options):
        if request is None:
            num_skipped += 1
        else:
            requests.append(request)
            if len(requests) == options.limit:
                break
    if not requests:
        raise ConfigError(f"{path}: no request can be served ({num_skipped} skipped) when read as {name}")
    try:
        check_ids(requests)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if num_skipped:
        logger.warning(
            "%s: skipped %d of %d requests without prompt or output or, in ShareGPT, with lengths outside the limits",
            path,
            num_skipped,
            num_skipped + len(requests),
        )
    start = min(request.arrival for request in requests if request.follows is None)
    times = [request.arrival - (start if request.follows is None else 0.0) for request in requests]
    shifted = [replace(each, arrival=round(time, 6)) for each, time in zip(requests, times, strict=True)]
    return shifted if options.closed_loop else sorted(shifted, key=lambda request: request.arrival)


def detect_trace_format(path: Path) -> str:
    """Returns the format of a trace file, detected from its beginning.

    Raises:
        ConfigError: the file cannot be read, or its format is unknown.
    """
    with open_text_file(path) as file:
        head = file.read(4096).lstrip()
        if head.startswith("["):
            return "sharegpt"
        line = (head + file.readline()).partition("\n")[0].strip()
    candidates = KEYS if line.startswith("{") else COLUMNS
    if candidates is KEYS:
        try:
            fields = set(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}: the first line is not a JSON object ({error})") from None
    else:
        fields = {column.strip() for column in line.split(",")}
    found = [name for name, needed in candidates.items() if needed <= fields]
    if not found:
        needed = "; ".join(f"{name}: {', '.join(sorted(names))}" for name, names in {**COLUMNS, **KEYS}.items())
        raise ConfigError(
            f"{path}: not a trace in a known format; it starts with {line!r:.120}. The first line needs the columns or "
            f"keys of one of these: {needed}; sharegpt is a JSON list"
        )
    return found[0]
