"""The entry point of the command line, with the command `version`."""

from __future__ import annotations

from typing import Annotated

import typer

from chairlift import __version__
from chairlift.cli.batch import batch
from chairlift.cli.bench import bench
from chairlift.cli.chat import chat
from chairlift.cli.commands import Commands
from chairlift.cli.config_file import ENVIRONMENT_SETTINGS
from chairlift.cli.generate import generate
from chairlift.cli.key import key
from chairlift.cli.models import models, pull
from chairlift.cli.plan import plan
from chairlift.cli.report import report
from chairlift.cli.serve_command import serve
from chairlift.cli.simulate import simulate
from chairlift.cli.top import top
from chairlift.errors import ChairliftError

app = Commands(
    name="chairlift",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve large language models with continuous batching and paged KV memory."""


app.command("serve", context_settings=ENVIRONMENT_SETTINGS)(serve)
app.command()(generate)
app.command()(chat)
app.command()(batch)
app.command()(key)
app.command()(plan)
app.command()(simulate)
app.command()(pull)
app.add_typer(models, name="models")
app.command()(report)
app.command()(top)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command line. Errors of the user are printed as a message with exit status 2, without a traceback."""
    try:
        app()
    except ChairliftError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise SystemExit(2) from None
