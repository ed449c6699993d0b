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
from chairlift.events import EngineStarted, Event, RequestArrived, Step, read_events
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
        runs = [recorded_run(read_log(path), label) for label, path in given]
    alike = Counter(run.label for run in runs)
    for run, (label, path) in zip(runs, given, strict=True):
        if label is None and alike[run.label] > 1:
            run.label = f"{run.label} ({path.stem})"
    label, count = Counter(run.label for run in runs).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"label {label!r} is used for several event logs: use a different LABEL=PATH for each")
    return runs


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
        ConfigError: the file is not a valid event log; the message has the line and the reason.
    """
    events: list[Event] = []
    checker = _LogChecker(path)
    try:
        for event in read_events(path):
            checker.check(event)
            events.append(event)
    except OSError as error:
        raise ConfigError(f"event log {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"not an event log: {path}, line {len(events) + 1}: not UTF-8") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"not an event log: {error}") from None
    checker.check_end()
    return events


class _LogChecker:
    """Checks the order of the events of one run and the lengths of the columns of steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._line = 0
        self._last_step: Step | None = None
        self._known: set[str] = set()
        self._running: set[str] = set()

    def check(self, event: Event) -> None:
        self._line += 1
        if (self._line == 1) is not isinstance(event, EngineStarted):
            problem = "the first event must be" if self._line == 1 else "a second run begins with"
            raise self._error(f"{problem} engine_started; an event log must have exactly one run")
        if isinstance(event, RequestArrived):
            self._known.add(event.request_id)
        elif isinstance(event, Step):
            self._check_step(event)

    def _check_step(self, step: Step) -> None:
        try:
            self._check_columns(step)
            self._check_order(step)
        except TypeError as error:
            raise self._error(f"a step with a field of the wrong type: {error}") from None
        step.request_ids[:] = map(sys.intern, step.request_ids)

    def _check_columns(self, step: Step) -> None:
        num_rows = len(step.request_ids)
        for name in ("num_scheduled", "num_computed", "num_new"):
            if len(getattr(step, name)) != num_rows:
                raise self._error(f"column {name} has {len(getattr(step, name))} entries for {num_rows} request_ids")
        for name in ("num_padding", "num_draft"):
            if len(getattr(step, name)) not in (0, num_rows):
                raise self._error(f"column {name} has {len(getattr(step, name))} entries for {num_rows} request_ids")
        self._running.update(step.admitted)
        if strangers := self._running - self._known:
            raise self._error(f"request {min(strangers)!r} was admitted without an arrival")
        if strangers := {*step.request_ids, *step.new_blocks} - self._running:
            raise self._error(f"request {min(strangers)!r} is in a step without an admission")

    def _check_order(self, step: Step) -> None:
        last, self._last_step = self._last_step, step
        if step.time < step.scheduled_time or (last is not None and step.time < last.time):
            raise self._error(f"time goes backwards in step {step.step}")

    def check_end(self) -> None:
        if not self._line:
            raise ConfigError(f"event log {self._path} is empty: record one with --event-log")
        if self._last_step is None:
            raise ConfigError(f"event log {self._path} has {self._line} lines but no step, so there is nothing to draw")

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._path}, line {self._line}: {message}")
