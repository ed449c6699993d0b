"""The application of the command line: its help is plain text, which fits any width and cuts no name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

MAX_NAME_COLUMNS = 28
"""The help of an option with a longer name begins on the next line."""


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each panel of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            is_argument = parameter.param_type_name == "argument"
            title = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
            sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=MAX_NAME_COLUMNS)


class SummarizedGroup(TyperGroup):
    """A group whose help has the whole first sentence of each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        records = [
            (name, command.get_short_help_str(limit=1000))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(records)


class Commands(typer.Typer):
    """A group of commands with plain help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(rich_markup_mode=None, cls=SummarizedGroup, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=GroupedCommand, **options)
