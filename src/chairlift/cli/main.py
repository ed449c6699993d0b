"""The entry point of the command line. The module of a command is imported when the command is used."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from cyclopts import App, CycloptsError, Parameter
from cyclopts.help import ColumnSpec, DefaultFormatter, DescriptionRenderer, NameRenderer

from chairlift.cli.console import ARGUMENTS, OPTIONS, print_error
from chairlift.errors import ChairliftError
from chairlift.option_sources import parse_error
from chairlift.version import __version__

NAME_COLUMNS: Final = 34
"""The columns of the names of options in --help, enough for the longest name."""

COMMANDS: Final = {
    "serve": "Serve an OpenAI-compatible API: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages and "
    "more.",
    "generate": "Generate answers to prompts, without a server.",
    "chat": "Chat in the terminal. /help lists the commands; Ctrl-C stops an answer.",
    "batch": "Answer a file of requests. After an interruption, the same command continues.",
    "lesson": "Learn batching: the same requests from static batches to paged memory, measured, as a table and a page.",
    "bench": "Measure engines and policies.",
    "plan": "Plan memory, KV blocks, concurrent requests under every policy and speed, and print the command to serve "
    "with.",
    "simulate": "Run the scheduler of the engine in virtual time. Prints constants and tables.",
    "report": "Show a recorded run in the live page on a free port of this machine.",
    "explain-cache": "Show why a recorded run computed prompt tokens again, and which prompts change needlessly.",
    "top": "Show the batch, the queue, KV memory and the wait reasons of requests of a running server.",
    "pull": "Download a model, and print its path. Files that are in the cache are not downloaded again.",
    "key": "Create an API key. Its entry for --api-key-file is printed to standard output, the secret to standard "
    "error.",
}

app = App(
    name="chairlift",
    help="Serve large language models with continuous batching and paged KV memory.",
    version=__version__,
    help_format="plaintext",
    help_formatter=DefaultFormatter(
        column_specs=(ColumnSpec(NameRenderer(NAME_COLUMNS)), ColumnSpec(DescriptionRenderer()))
    ),
    group_arguments=ARGUMENTS,
    group_parameters=OPTIONS,
    default_parameter=Parameter(allow_repeating=True, negative_iterable=()),
    result_action="return_value",
)
for _name, _help in COMMANDS.items():
    _module = _name.replace("-", "_")
    app.command(f"chairlift.cli.{_module}:{_module}", name=_name, help=_help)


@app.command
def version() -> None:
    """Print the version."""
    print(__version__)


def run_command(arguments: Sequence[str]) -> None:
    """Run a command.

    Args:
        arguments: the names of the command, and its arguments.

    Raises:
        ConfigError: an option is unknown or has a wrong value, or as for the command.
    """
    try:
        app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise parse_error(error) from None


def main() -> None:
    """Run the command line. Errors of the user are printed as a message with exit status 2, without a traceback."""
    output_errors = record_output_errors()
    try:
        run_command(sys.argv[1:])
        print(end="", flush=True)
    except ChairliftError as error:
        print_error(str(error))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:
        if error not in output_errors:
            raise
        if error.errno != errno.EPIPE:
            problem = f"the standard output cannot be written: {error.strerror}"
            print_error(f"{problem}; free space, or redirect it to another file")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again when it ends.
        raise SystemExit(1) from None


def record_output_errors() -> list[OSError]:
    """A list to which each error of a write to the file of the standard output is added from now on."""
    errors: list[OSError] = []
    buffer = getattr(sys.stdout, "buffer", None)  # The standard output is None if it is closed.
    file: Any = getattr(buffer, "raw", buffer)  # It has no buffer if PYTHONUNBUFFERED is set.
    if file is not None:
        file.write = partial(_write, file.write, errors)
    return errors


def _write(write: Callable[[bytes], int], errors: list[OSError], data: bytes) -> int:
    try:
        return write(data) if data else 0  # Writing nothing to a terminal that was closed is an error too.
    except OSError as error:
        errors.append(error)
        raise
