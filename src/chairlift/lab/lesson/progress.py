"""Shows the progress of the lesson in the terminal, from the events of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from chairlift.events import EngineStarted, Event, Step


class LessonProgress:
    """A context manager with one bar for each phase, and an event sink that moves the bars of runs.

    Args:
        first: title of the first phase.
    """

    def __init__(self, first: str) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._titles: Iterator[str] = iter(())
        self._num_tokens = 0
        self._task: TaskID | None = None
        self.start_phase(first)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish_phase()
        self._progress.stop()

    def start_phase(self, title: str, total: float | None = None) -> None:
        """End the current phase and start another one; a phase without a total shows that something happens."""
        self.finish_phase()
        self._task = self._progress.add_task(title, total=total)

    def expect_runs(self, titles: Iterable[str], num_tokens: int) -> None:
        """Name the runs that follow, each with this number of output tokens."""
        self._titles, self._num_tokens = iter(titles), num_tokens

    def finish_phase(self) -> None:
        """Mark the current phase as complete."""
        if self._task is not None:
            self._progress.update(self._task, total=1, completed=1)
            self._progress.stop_task(self._task)
        self._task = None

    def advance(self, amount: float) -> None:
        """Move the bar of the current phase."""
        if self._task is not None:
            self._progress.advance(self._task, amount)

    def emit(self, event: Event) -> None:
        if isinstance(event, EngineStarted):
            self.start_phase(next(self._titles), self._num_tokens)
        elif isinstance(event, Step):
            self.advance(sum(event.num_new))
