"""Prints presets and their results as tables, with one JSON object as the last line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TextIO

import rich.table
from rich.console import Console
from rich.text import Text

from chairlift.lab.presets import Preset, PresetResult, Table


def print_presets(presets: Sequence[Preset], file: TextIO | None = None) -> None:
    """Prints the name, title and source of each preset."""
    rows = [[preset.name, preset.title, preset.source] for preset in presets]
    console = Console(file=file or sys.stdout)
    console.print(_rich_table(Table("Presets", ["name", "title", "source"], rows), justify="left"))


def print_preset(preset: Preset, result: PresetResult, file: TextIO | None = None) -> None:
    """Prints the constants, the tables, the notes and one line of JSON."""
    out = file or sys.stdout
    console = Console(file=out)
    console.print(Text(f"{preset.title} ({preset.source})", style="bold"))
    print_constants(result.constants, out)
    for table in result.tables:
        console.print(_rich_table(table))
    for note in result.notes:
        console.print(Text(f"- {note}"))
    out.write(json.dumps(result.to_dict(preset.name)) + "\n")


def print_constants(constants: Sequence[tuple[str, str]], file: TextIO | None = None) -> None:
    """Prints the constants of a simulation as a table."""
    rows = [list(row) for row in constants]
    Console(file=file or sys.stdout).print(_rich_table(Table("Constants", ["name", "value"], rows), justify="left"))


def _rich_table(table: Table, justify: rich.console.JustifyMethod = "right") -> rich.table.Table:
    shown = rich.table.Table(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify=justify if index else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown
