"""Reads a trace of any format, and detects the format from the beginning of the file."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest, dependency_order
from chairlift.lab.workload.traces.chairlift_format import read_chairlift
from chairlift.lab.workload.traces.length_traces import (
    AZURE_COLUMNS,
    BURSTGPT_COLUMNS,
    read_azure,
    read_burstgpt,
    read_mooncake,
)
from chairlift.lab.workload.traces.options import Reader, RecordedTrace, TraceOptions
from chairlift.lab.workload.traces.records import open_text_file
from chairlift.lab.workload.traces.text_datasets import read_custom, read_sharegpt

logger = logging.getLogger("chairlift")

FORMATS: Final[dict[str, Reader]] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
    "sharegpt": read_sharegpt,
    "custom": read_custom,
    "chairlift": read_chairlift,
}

FORMAT_OPTIONS: Final = {"output_len": "custom", "multi_turn": "sharegpt", "hash_block_size": "mooncake"}
"""The options that apply to one format only."""

CSV_COLUMNS: Final = {"azure": AZURE_COLUMNS, "burstgpt": BURSTGPT_COLUMNS}
JSON_KEYS: Final = {"mooncake": {"input_length"}, "custom": {"prompt"}, "chairlift": {"arrival", "output_len"}}

DEFAULT_OPTIONS: Final = TraceOptions()


def read_trace(
    path: Path | str,
    format: str = "auto",  # noqa: A002
    options: TraceOptions = DEFAULT_OPTIONS,
) -> list[WorkloadRequest]:
    """Returns the requests of a trace by arrival, and logs the number of skipped ones. Raises as `load_trace`."""
    trace = load_trace(path, format, options)
    if trace.num_skipped:
        logger.warning(
            "%s: skipped %d of %d requests without prompt or output or, in ShareGPT, with lengths outside the limits",
            path,
            trace.num_skipped,
            trace.num_skipped + len(trace.requests),
        )
    return trace.requests


def load_trace(
    path: Path | str,
    format: str = "auto",  # noqa: A002
    options: TraceOptions = DEFAULT_OPTIONS,
) -> RecordedTrace:
    """Reads a trace file.

    Args:
        format: one of FORMATS, or auto: detected from the header or the first object.

    Raises:
        ConfigError: the file cannot be read, its format is unknown, a field is wrong, no request can be served, or an
            option does not apply to the format.
    """
    path = Path(path)
    name = detect_trace_format(path) if format == "auto" else format
    if name not in FORMATS:
        raise ConfigError(f"trace format {name!r} is unknown; use one of auto, {', '.join(FORMATS)}")
    for option, owner in FORMAT_OPTIONS.items():
        if owner != name and getattr(options, option) != getattr(DEFAULT_OPTIONS, option):
            raise ConfigError(f"{path}: {option} applies to {owner} traces only, and this one is read as {name}")
    requests, num_skipped = _collect(FORMATS[name](path, options), options.limit)
    if not requests:
        raise ConfigError(f"{path}: no request can be served ({num_skipped} skipped) when read as {name}")
    try:
        requests = dependency_order(requests)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return RecordedTrace(name, _shifted_to_zero(requests), num_skipped)


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
    """Returns the first `limit` requests whose predecessors are among them, and the number of skipped ones."""
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
