"""Shows a progress bar for each run of the lesson, from its events."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from chairlift.engine.progress import progress_bar
from chairlift.events import EngineStarted, Event, Step


class RunBars:
    """An event sink that shows one progress bar at a time.

    Args:
        bar: has the bar that is shown; the bar of a run replaces it.
        titles: of the runs, in their order.
        num_tokens: output tokens of each run.
    """

    def __init__(self, bar: ExitStack, titles: Iterable[str], num_tokens: int) -> None:
        self._bar = bar
        self._titles = iter(titles)
        self._num_tokens = num_tokens

    def emit(self, event: Event) -> None:
        if isinstance(event, EngineStarted):
            self._bar.close()
            self._advance = self._bar.enter_context(progress_bar(next(self._titles), self._num_tokens))
        elif isinstance(event, Step):
            self._advance(sum(event.num_new))
