"""Reads a trace of any format, and detects the format from the beginning of the file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest, dependency_order
from chairlift.lab.workload.traces.formats import (
    Requests,
    TraceOptions,
    open_text_file,
    read_azure,
    read_burstgpt,
    read_chairlift,
    read_custom,
    read_mooncake,
    read_sharegpt,
)

logger = logging.getLogger("chairlift")

FORMATS: Final[dict[str, Callable[[Path, TraceOptions], Requests]]] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
    "sharegpt": read_sharegpt,
    "custom": read_custom,
    "chairlift": read_chairlift,
}

CSV_COLUMNS: Final = {
    "azure": {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    "burstgpt": {"Timestamp", "Request tokens", "Response tokens"},
}
JSON_KEYS: Final = {"mooncake": {"input_length"}, "custom": {"prompt"}, "chairlift": {"arrival", "output_len"}}


def read_trace(path: Path | str, options: TraceOptions | None = None) -> list[WorkloadRequest]:
    """Returns the requests of a trace file, whose format is detected, by arrival. The first one arrives at 0.

    Requests with equal times keep the order of the file, and a request with `after` follows that one. Requests that
    cannot be served are skipped, and their number is logged: they have no prompt or output tokens (logs write failed
    requests in this way) or, in sharegpt, lengths outside the limits of `formats`.

    Raises:
        ConfigError: the file cannot be read, its format is unknown, a field is wrong, or no request can be served.
    """
    path, options = Path(path), options or TraceOptions()
    name = detect_trace_format(path)
    requests, num_skipped = _collect(FORMATS[name](path, options), options.limit)
    if not requests:
        raise ConfigError(f"{path}: no request can be served ({num_skipped} skipped) when read as {name}")
    try:
        requests = dependency_order(requests)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if num_skipped:
        logger.warning(
            "%s: skipped %d of %d requests without prompt or output or, in ShareGPT, with lengths outside the limits",
            path,
            num_skipped,
            num_skipped + len(requests),
        )
    return _shifted_to_zero(requests)


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
    if line.startswith("{"):
        try:
            keys = set(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}: the first line is not a JSON object ({error})") from None
        found = [name for name, needed in JSON_KEYS.items() if needed <= keys]
    else:
        columns = {column.strip() for column in line.split(",")}
        found = [name for name, header in CSV_COLUMNS.items() if columns.issuperset(header)]
    if not found:
        raise ConfigError(f"{path}: not a trace in a known format ({', '.join(FORMATS)}); it starts with {line!r:.120}")
    return found[0]


def _collect(read: Iterable[WorkloadRequest | None], limit: int | None) -> tuple[list[WorkloadRequest], int]:
    """Returns the first `limit` requests, and the number of skipped records.

    If there are more, requests that depend on a later one are left out.
    """
    requests: list[WorkloadRequest] = []
    num_skipped = 0
    for request in read:
        if request is None:
            num_skipped += 1
            continue
        requests.append(request)
        if len(requests) == limit:
            return _without_missing_predecessors(requests), num_skipped
    return requests, num_skipped


def _without_missing_predecessors(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    """Returns the requests that do not depend, directly or indirectly, on a request that was not read."""
    while True:
        known = {request.request_id for request in requests}
        kept = [request for request in requests if request.after is None or request.after in known]
        if len(kept) == len(requests):
            return kept
        requests = kept


def _shifted_to_zero(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    """Returns the requests by arrival, the first at 0, rounded to microseconds; successors directly follow."""
    start = min(request.arrival for request in requests if request.after is None)
    begin: dict[str, float] = {}
    moved: list[WorkloadRequest] = []
    for request in requests:
        if request.after is None:
            request = replace(request, arrival=round(request.arrival - start, 6))
        begin[request.request_id] = request.arrival if request.after is None else begin[request.after]
        moved.append(request)
    return sorted(moved, key=lambda request: begin[request.request_id])
