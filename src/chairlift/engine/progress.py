"""A progress bar on standard error, shown only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

AdvanceBar = Callable[..., None]
"""Advances a progress bar by a number of steps (1 without an argument), and sets the values of its columns."""


@contextmanager
def progress_bar(description: str, total: int, *columns: str, is_shown: bool = True) -> Iterator[AdvanceBar]:
    """Show a progress bar until the context ends.

    Args:
        total: the number of its steps.
        columns: names of values that the bar shows in addition, which begin at 0.
    """
    console = Console(stderr=True)
    shown = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    shown += [TextColumn(f"{{task.fields[{name}]}} {name}") for name in columns]
    initial: dict[str, Any] = dict.fromkeys(columns, 0)
    is_disabled = not (is_shown and console.is_terminal)
    with Progress(*shown, console=console, transient=True, refresh_per_second=4, disable=is_disabled) as bar:
        task = bar.add_task(description, total=total, **initial)

        def advance(steps: int = 1, /, **values: Any) -> None:
            bar.update(task, advance=steps, **values)

        yield advance
