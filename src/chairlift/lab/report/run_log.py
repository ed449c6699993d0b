"""Event logs as runs: read, checked, traced, named."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, Event, RequestArrived, Step, read_events
from chairlift.lab.metrics.requests import RequestMetrics, request_metrics
from chairlift.lab.metrics.run import RunMetrics, summarize
from chairlift.lab.report.memory import MemoryKinds, live_kinds, true_kinds_of
from chairlift.lab.report.trace import RunTrace, trace_events

AT_ONCE = 0.01
"""Arrivals within this share of the run came at once."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One event log.

    Attributes:
        live: the kinds of KV memory step by step as the engine saw them, `kinds` with the true lengths; None if the log
            does not have them (schema version 1).
    """

    label: str
    source: str
    trace: RunTrace
    requests: list[RequestMetrics]
    metrics: RunMetrics
    live: list[MemoryKinds] | None
    kinds: list[MemoryKinds] | None

    @property
    def started(self) -> EngineStarted:
        return self.trace.started

    @property
    def policy(self) -> str:
        """What is compared: `batching`/`kv`."""
        return f"{self.started.batching}/{self.started.kv}"

    @property
    def is_static(self) -> bool:
        return self.started.batching == "static"

    @property
    def num_seats(self) -> int:
        """Requests that may be in the batch at once."""
        static_batch_size = self.started.static_batch_size
        return self.started.max_num_seqs if static_batch_size is None else static_batch_size

    @property
    def output_lengths(self) -> list[int]:
        """Of the requests that were answered, in tokens."""
        return [r.num_output_tokens for r in self.requests if r.is_answered]

    @property
    def arrivals(self) -> str:
        """How the requests came: the rate that was observed."""
        times = [r.arrival for r in self.requests]
        if len(times) < 2 or times[-1] - times[0] <= AT_ONCE * self.trace.duration:
            return "all at once"
        return f"{(len(times) - 1) / (times[-1] - times[0]):.3g} requests/s"


def recorded_run(events: Iterable[Event], label: str | None = None, source: str = "") -> RecordedRun:
    """A run from events that are known to be whole, in the order in which they were emitted."""
    events = list(events)
    trace = trace_events(events)
    live = live_kinds(trace)
    return RecordedRun(
        label=label or default_label(trace.started),
        source=source,
        trace=trace,
        requests=request_metrics(events),
        metrics=summarize(events),
        live=live,
        kinds=None if live is None else true_kinds_of(trace),
    )


def default_label(started: EngineStarted) -> str:
    """Such as "static(8)/max" and "continuous/paged"."""
    size = "" if started.static_batch_size is None else f"({started.static_batch_size})"
    run_to = ", to global" if started.static_run_to == "global" else ""
    return f"{started.batching}{size}/{started.kv}{run_to}"


def load_runs(arguments: Sequence[str]) -> list[RecordedRun]:
    """The runs of log files, each given as PATH or LABEL=PATH; a folder stands for the .jsonl files in it.

    Raises:
        ConfigError: a file that cannot be read or is no event log (names file and line), or a label given twice.
    """
    given = [entry for argument in arguments for entry in _logs_in(*_split(argument))]
    labels = [label for label, _ in given if label is not None]
    if repeated := [label for label, count in Counter(labels).items() if count > 1]:
        raise ConfigError(f"label {repeated[0]!r} is given to several event logs; give each its own as LABEL=PATH")
    with _uncollected():
        runs = [recorded_run(read_log(path), label, path.name) for label, path in given]
    return _with_distinct_labels(runs, set(labels))


def _logs_in(label: str | None, path: Path) -> list[tuple[str | None, Path]]:
    if label is not None or not os.path.isdir(path):
        return [(label, path)]
    return [(None, log) for log in sorted(path.glob("*.jsonl"))] or [(None, path)]


@contextmanager
def _uncollected() -> Iterator[None]:
    """A log becomes millions of objects and no garbage, which the collector would search again and again."""
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
        raise ConfigError(f"{argument!r} is neither a file nor LABEL=PATH")
    return label, Path(path)


def _with_distinct_labels(runs: Sequence[RecordedRun], fixed: set[str]) -> list[RecordedRun]:
    """Runs that would be called alike get the name of their file besides, and then a number."""
    alike = Counter(run.label for run in runs)
    named = [
        run
        if run.label in fixed or alike[run.label] == 1
        else replace(run, label=f"{run.label} ({Path(run.source).stem})")
        for run in runs
    ]
    seen: Counter[str] = Counter()
    result = []
    for run in named:
        seen[run.label] += 1
        result.append(run if seen[run.label] == 1 else replace(run, label=f"{run.label} #{seen[run.label]}"))
    return result


def read_log(path: Path) -> list[Event]:
    """The events of one run.

    Raises:
        ConfigError: says in which line the file stops being an event log, or what it lacks.
    """
    events: list[Event] = []
    checker = _Checker(path)
    try:
        for event in read_events(path):
            checker.take(event)
            events.append(event)
    except OSError as error:
        raise ConfigError(f"event log {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}, line {len(events) + 1}: not UTF-8, so not an event log") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"not an event log: {error}") from None
    checker.end()
    return events


class _Checker:
    """What figures rely on beyond the fields' names: events of one run, in order, with columns that are parallel."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._line = 0
        self._last_step: Step | None = None
        self._known: set[str] = set()
        self._running: set[str] = set()

    def take(self, event: Event) -> None:
        self._line += 1
        if (self._line == 1) is not isinstance(event, EngineStarted):
            expected = "the first event must be" if self._line == 1 else "a second run begins here with"
            raise self._error(f"{expected} engine_started; a report takes one whole run a file")
        if isinstance(event, RequestArrived):
            self._known.add(event.request_id)
        elif isinstance(event, Step):
            self._take_step(event)

    def _take_step(self, step: Step) -> None:
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
        if len(step.num_padding) not in (0, num_rows):
            raise self._error(f"column num_padding has {len(step.num_padding)} entries for {num_rows} request_ids")
        self._running.update(step.admitted)
        if strangers := self._running - self._known:
            raise self._error(f"request {min(strangers)!r} was admitted and never arrived")
        if strangers := {*step.request_ids, *step.new_blocks} - self._running:
            raise self._error(f"request {min(strangers)!r} is in a step and was never admitted")

    def _check_order(self, step: Step) -> None:
        last, self._last_step = self._last_step, step
        if step.time < step.scheduled_time or (last is not None and step.time < last.time):
            raise self._error(f"time goes backwards in step {step.step}")

    def end(self) -> None:
        if not self._line:
            raise ConfigError(f"event log {self._path} is empty: write one with --event-log")
        if self._last_step is None:
            raise ConfigError(f"event log {self._path}, {self._line} lines: no step was computed, nothing can be drawn")

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._path}, line {self._line}: {message}")
