"""Reports of the laboratory: tables, numbers, and one JSON line for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

FILE_WIDTH: Final = 200
"""Width in columns where the output is not a terminal. A table uses only what it needs."""


def number(value: float) -> str:
    """Format a number with three or more significant digits and without an exponent."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def make_table(
    title: str,
    columns: Sequence[str],
    caption: str | None = None,
    *,
    rows: Iterable[Sequence[str]] = (),
    justify: JustifyMethod = "right",
) -> Table:
    """Create a table. The first column is aligned to the left and never wrapped, the others as `justify` says."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        if index:
            table.add_column(column, justify=justify, overflow="fold")
        else:
            table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def constants_table(constants: Iterable[tuple[str, str]]) -> Table:
    """Create the table of the constants of a simulation or calibration."""
    return make_table("Constants", ["name", "value"], rows=constants, justify="left")


def print_parts(parts: Iterable[RenderableType]) -> None:
    """Print tables and lines of text.

    A terminal wraps strings between words. Commands are `Text` and never wrapped, so that they can be copied.
    """
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text) or (isinstance(part, str) and not console.is_terminal))


def print_report(parts: Iterable[RenderableType], record: Mapping[str, Any], as_json: bool = False) -> None:
    """Print tables and lines of text, or the record as one JSON line."""
    if as_json:
        sys.stdout.write(json_line(record))
    else:
        print_parts(parts)


def json_line(record: Mapping[str, Any]) -> str:
    """The record as one line of standard JSON with its newline. Infinities become the strings "inf" and "-inf", and
    paths become strings."""
    return json.dumps(_to_json(record), allow_nan=False) + "\n"


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
