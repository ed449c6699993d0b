"""The entry point of the command line, with the commands `serve` and `version`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from chairlift import __version__
from chairlift.cli.batch import batch
from chairlift.cli.bench import bench
from chairlift.cli.chat import chat
from chairlift.cli.commands import Commands
from chairlift.cli.config_file import ENVIRONMENT_SETTINGS, add_config_file
from chairlift.cli.engine_options import MODEL_HELP, add_engine_options, log_to_stderr
from chairlift.cli.generate import generate
from chairlift.cli.key import key
from chairlift.cli.model_options import MODEL_VARIABLE, ModelOptions, add_model_options
from chairlift.cli.models import models, pull
from chairlift.cli.option_groups import OptionValues, add_group, option
from chairlift.cli.plan import plan
from chairlift.cli.report import report
from chairlift.cli.serve_options import add_sampling_options, add_serve_options
from chairlift.cli.simulate import simulate
from chairlift.cli.top import top
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError
from chairlift.server.access.access_options import AccessOptions
from chairlift.server.access.server_limits import ServerLimits
from chairlift.server.api.api_options import ApiOptions
from chairlift.server.telemetry.observability_options import ObservabilityOptions
from chairlift.server.web.page_options import PageOptions

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


@app.command(context_settings=ENVIRONMENT_SETTINGS)
@add_model_options
@add_engine_options
@add_sampling_options
@add_serve_options
@add_config_file
@add_group(
    option(
        "watchdog_timeout",
        float,
        120.0,
        min=0,
        help="Seconds without a step after which a busy engine is restarted; 0 disables it.",
    ),
    host=(str, "Address to listen on.", "127.0.0.1"),
    port=(int, "Port to listen on; 0 selects a free one.", 8000),
    served_model_name=(str | None, "Name of the model in requests."),
)
def serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"{MODEL_HELP} Several models are loaded on demand.",
            envvar=MODEL_VARIABLE,
            show_envvar=False,
        ),
    ] = None,
    *,
    options: OptionValues,
    models: ModelOptions,
    config: EngineConfig,
    limits: ServerLimits,
    access: AccessOptions,
    api: ApiOptions,
    observability: ObservabilityOptions,
    pages: PageOptions,
) -> None:
    """Serve an OpenAI-compatible API: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages and more."""
    started = time.perf_counter()
    log_to_stderr()
    from chairlift.server.serve import run

    run(
        config,
        **options,
        started=started,
        limits=limits,
        access=access,
        api=api,
        observability=observability,
        pages=pages,
        models=models.specs(config, api) if models.on_demand else None,
        model_limits=models.limits(config) if models.on_demand else None,
    )


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
