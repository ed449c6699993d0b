"""The command line: parse, build, call. The larger commands are in `chairlift.cli`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from chairlift import __version__
from chairlift.cli.batch import batch
from chairlift.cli.bench import bench
from chairlift.cli.engine_options import ModelArgument, ModelOption, add_engine_options, log_to_stderr
from chairlift.cli.key import key
from chairlift.cli.plan import plan
from chairlift.cli.report import report
from chairlift.cli.serve_options import add_serve_options
from chairlift.cli.simulate import simulate
from chairlift.cli.top import top
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError
from chairlift.server.access.access_options import AccessOptions
from chairlift.server.access.server_limits import ServerLimits
from chairlift.server.api.api_options import ApiOptions
from chairlift.server.telemetry.observability_options import ObservabilityOptions

app = typer.Typer(
    name="chairlift",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Continuous batching and paged KV memory for large language models."""


@app.command()
@add_engine_options
def generate(
    prompt: Annotated[list[str], typer.Argument(help="One or more prompts, answered together.")],
    model: ModelOption = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    chat: Annotated[bool, typer.Option(help="Answer the prompt as a message; else continue it.")] = True,
    *,
    config: EngineConfig,
) -> None:
    """Answer prompts offline."""
    from chairlift.sampling_params import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens)
    from chairlift.engine.llm import LLM

    llm = LLM.from_config(config)
    if chat and llm.engine.tokenizer.has_chat_template:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in prompt], params)
    else:
        outputs = llm.generate(prompt, params)
    for output in outputs:
        typer.echo(output.outputs[0].text.strip() if chat else f"{output.prompt}{output.outputs[0].text}")
    llm.close()


@app.command()
@add_engine_options
@add_serve_options
def serve(
    model: ModelArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="What requests call the model.")] = None,
    watchdog_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds without a step after which a busy engine is started again; 0: never.")
    ] = 120.0,
    *,
    config: EngineConfig,
    limits: ServerLimits,
    access: AccessOptions,
    api: ApiOptions,
    observability: ObservabilityOptions,
) -> None:
    """Serve an OpenAI-compatible API: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages and more."""
    started = time.perf_counter()
    log_to_stderr()
    from chairlift.server.serve import run

    run(config, host, port, served_model_name, watchdog_timeout, started, limits, access, api, observability)


app.command()(batch)
app.command()(key)
app.command()(plan)
app.command()(simulate)
app.command()(report)
app.command()(top)


@app.command()
def fetch() -> None:
    """Put the default model into the model cache."""
    from chairlift.loading.fetch import fetch_default_model

    typer.echo(fetch_default_model())


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command line; what a user can cause ends with a sentence and exit status 2, not with a traceback."""
    try:
        app()
    except ChairliftError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise SystemExit(2) from None
