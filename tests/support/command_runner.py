"""Runs commands of the command line in the process of a test, and lists the commands with their options."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

from cyclopts import App
from rich.console import Console

from chairlift.cli.main import app, run_command
from chairlift.errors import ChairliftError
from chairlift.server.serve_options import ServeOptions


@dataclass
class CommandResult:
    """What a command wrote, and how it ended.

    Attributes:
        exception: the error of the user that the command ended with.
    """

    stdout: str
    stderr: str
    exit_code: int
    exception: ChairliftError | None

    @property
    def output(self) -> str:
        return f"{self.stdout}{self.stderr}{self.exception or ''}"


def invoke(arguments: Sequence[str], env: Mapping[str, str] | None = None, text: str = "") -> CommandResult:
    """Run a command with these arguments and variables, and `text` as its standard input.

    Other errors than those of the user are raised.
    """
    stdout, stderr, exit_code, failed = io.StringIO(), io.StringIO(), 0, None
    with (
        mock.patch.dict(os.environ, env or {}),
        mock.patch("sys.stdin", io.StringIO(text)),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        app.console = Console()  # has the width of this call
        try:
            run_command(arguments)
        except ChairliftError as error:
            exit_code, failed = 2, error
        except SystemExit as ended:
            exit_code = ended.code if isinstance(ended.code, int) else 0
    return CommandResult(stdout.getvalue(), stderr.getvalue(), exit_code, failed)


def find_command(names: Sequence[str]) -> App:
    """The command with these names, such as ["bench", "compare"]."""
    found = app
    for name in names:
        found = found[name]
    return found


def all_commands(*names: str) -> Iterator[tuple[str, ...]]:
    """The names of all commands, and of the groups that they are in."""
    yield names
    command = find_command(names)
    for name in command:
        if not name.startswith("-"):
            yield from all_commands(*names, name)


def arguments_of(*names: str) -> list[Any]:
    """The arguments of cyclopts of a command; of a group without a command of its own there are none."""
    command = find_command(names)
    return [] if command.default_command is None else list(command.assemble_argument_collection())


@cache
def options_of(*names: str) -> set[str]:
    """The options of a command, as on the command line."""
    return {name for argument in arguments_of(*names) for name in (*argument.names, *argument.negatives)}


def run_arguments(options: ServeOptions, _started: float, start_cluster: Any = None) -> dict[str, Any]:
    """What `chairlift.server.serve.run` makes of its arguments, by name."""
    models = options.models.specs(options.engine, options.api) if options.models.is_on_demand else None
    return {
        **{name: getattr(options, name) for name in ServeOptions.__dataclass_fields__},
        "config": options.engine,
        "models": models,
        "memory_budget": None if models is None else options.models.memory_budget(options.engine),
        "start_cluster": start_cluster,
    }
