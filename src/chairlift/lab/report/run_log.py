"""Reads event logs, checks them, and returns runs with distinct labels."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, Event, Step, read_events
from chairlift.lab.metrics.requests import RequestMetrics, request_metrics
from chairlift.lab.metrics.run import RunMetrics, summarize
from chairlift.lab.report.memory import MemoryKinds, live_kinds, true_kinds
from chairlift.lab.report.trace import RunTrace, trace_events


@dataclass(slots=True)
class RecordedRun:
    """A run with its trace and metrics, from one event log.

    Attributes:
        live: the kinds of slots of each step as in the log; None if the log has none (schema version 1).
        kinds: the kinds of slots with the true output lengths.
    """

    label: str
    trace: RunTrace
    requests: list[RequestMetrics]
    metrics: RunMetrics
    live: list[MemoryKinds] | None
    kinds: list[MemoryKinds] | None

    @property
    def started(self) -> EngineStarted:
        return self.trace.started


def recorded_run(events: Iterable[Event], label: str | None = None) -> RecordedRun:
    """The run of a list of events, which must be valid, in the order in which they were emitted."""
    events = list(events)
    trace = trace_events(events)
    live = live_kinds(trace)
    return RecordedRun(
        label=label or default_label(trace.started),
        trace=trace,
        requests=request_metrics(events),
        metrics=summarize(events),
        live=live,
        kinds=None if live is None else true_kinds(trace),
    )


def default_label(started: EngineStarted) -> str:
    """A label with the policies of a run, such as "static(8)/max" and "continuous/paged"."""
    size = "" if started.static_batch_size is None else f"({started.static_batch_size})"
    run_to = ", to global" if started.static_run_to == "global" else ""
    return f"{started.batching}{size}/{started.kv}{run_to}"


def load_runs(arguments: Sequence[str]) -> list[RecordedRun]:
    """The runs of event logs, each given as PATH or LABEL=PATH. Runs of equal policies get the names of their files.

    Raises:
        ConfigError: a file cannot be read or is not an event log, or two runs have the same label.
    """
    given = [_split(argument) for argument in arguments]
    with _without_garbage_collection():
        runs = [_load_run(path, label) for label, path in given]
    alike = Counter(run.label for run in runs)
    for run, (label, path) in zip(runs, given, strict=True):
        if label is None and alike[run.label] > 1:
            run.label = f"{run.label} ({path.stem})"
    label, count = Counter(run.label for run in runs).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"label {label!r} is used for several event logs: use a different LABEL=PATH for each")
    return runs


def _load_run(path: Path, label: str | None) -> RecordedRun:
    events = read_log(path)
    try:
        for event in events:
            if isinstance(event, Step):
                event.request_ids[:] = map(sys.intern, event.request_ids)
        return recorded_run(events, label)
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"event log {path} is damaged: its events do not belong together ({error!r})") from None


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, which would repeatedly scan the millions of objects of a log."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _split(argument: str) -> tuple[str | None, Path]:
    label, separator, path = argument.partition("=")
    if not separator or os.path.exists(argument):
        return None, Path(argument)
    if not label or not path:
        raise ConfigError(f"{argument!r} must be PATH or LABEL=PATH")
    return label, Path(path)


def read_log(path: Path) -> list[Event]:
    """The events of the log of one run.

    Raises:
        ConfigError: the file is not a valid event log, or has no step or not exactly one run.
    """
    events = list(read_events(path))
    if not events:
        raise ConfigError(f"event log {path} is empty: record one with --event-log")
    starts = [number for number, event in enumerate(events, start=1) if isinstance(event, EngineStarted)]
    if starts != [1]:
        raise ConfigError(
            f"event log {path} must have exactly one run, which begins in line 1 with engine_started; its event is in "
            f"lines {', '.join(map(str, starts)) or 'none'}"
        )
    if not any(isinstance(event, Step) for event in events):
        raise ConfigError(f"event log {path} has {len(events)} lines but no step, so there is nothing to draw")
    return events
