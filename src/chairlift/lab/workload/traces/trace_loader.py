"""One entrance for all formats."""

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
"""Options that mean something to one format only."""

CSV_COLUMNS: Final = {"azure": AZURE_COLUMNS, "burstgpt": BURSTGPT_COLUMNS}
JSON_KEYS: Final = {"mooncake": {"input_length"}, "custom": {"prompt"}, "chairlift": {"arrival", "output_len"}}

DEFAULT_OPTIONS: Final = TraceOptions()


def read_trace(
    path: Path | str,
    format: str = "auto",  # noqa: A002
    options: TraceOptions = DEFAULT_OPTIONS,
) -> list[WorkloadRequest]:
    """The requests of a trace, by arrival; how many were skipped is logged. Errors as `load_trace`."""
    trace = load_trace(path, format, options)
    if trace.num_skipped:
        logger.warning(
            "%s: %d of %d requests skipped: nothing to compute or, of ShareGPT, too short or too long",
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
    """A trace, in one of FORMATS.

    Args:
        format: auto: recognized by its header or first object.

    Raises:
        ConfigError: the file cannot be read, is in none of the formats, has a field that makes no sense (with its line
            and value), no request that can be served, or an option is of no use to its format.
    """
    path = Path(path)
    name = detect_trace_format(path) if format == "auto" else format
    if name not in FORMATS:
        raise ConfigError(f"trace format {name!r} is not known; known are auto, {', '.join(FORMATS)}")
    for option, owner in FORMAT_OPTIONS.items():
        if owner != name and getattr(options, option) != getattr(DEFAULT_OPTIONS, option):
            raise ConfigError(f"{path}: {option} is for {owner} traces, and this one is read as {name}")
    requests, num_skipped = _collect(FORMATS[name](path, options), options.limit)
    if not requests:
        raise ConfigError(f"{path}: no request that can be served ({num_skipped} skipped), read as {name}")
    try:
        requests = dependency_order(requests)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return RecordedTrace(name, _from_zero(requests), num_skipped)


def detect_trace_format(path: Path) -> str:
    """The format of a file, by its beginning.

    Raises:
        ConfigError: the file cannot be read, or is in none of the formats.
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
        raise ConfigError(f"{path}: not a trace in a known format ({', '.join(FORMATS)}); it begins with {line!r:.120}")
    return found[0]


def _collect(read: Iterable[WorkloadRequest | None], limit: int | None) -> tuple[list[WorkloadRequest], int]:
    """The first `limit` requests and the number of those skipped among them; without those whose predecessor lies
    behind the limit."""
    requests: list[WorkloadRequest] = []
    num_skipped = 0
    for request in read:
        if request is None:
            num_skipped += 1
            continue
        requests.append(request)
        if len(requests) == limit:
            return _with_predecessor(requests), num_skipped
    return requests, num_skipped


def _with_predecessor(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    """Without the requests that wait, however indirectly, for one that is not there."""
    while True:
        known = {request.request_id for request in requests}
        kept = [request for request in requests if request.after is None or request.after in known]
        if len(kept) == len(requests):
            return kept
        requests = kept


def _from_zero(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    """By arrival, the first at 0, to the microsecond; who comes after another one follows it directly."""
    start = min(request.arrival for request in requests if request.after is None)
    begin: dict[str, float] = {}
    moved: list[WorkloadRequest] = []
    for request in requests:
        if request.after is None:
            request = replace(request, arrival=round(request.arrival - start, 6))
        begin[request.request_id] = request.arrival if request.after is None else begin[request.after]
        moved.append(request)
    return sorted(moved, key=lambda request: begin[request.request_id])
