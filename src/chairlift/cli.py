"""The command line: parse, build, call."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from chairlift import __version__
from chairlift.config import (
    ATTENTION_BACKENDS,
    DTYPES,
    KV_ARENAS,
    KV_POLICIES,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from chairlift.errors import ChairliftError

app = typer.Typer(
    name="chairlift",
    help="Continuous batching and paged KV memory for large language models.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench, name="bench")


HELP = {
    "device": "cpu or cuda.",
    "dtype": f"Of weights and activations: {', '.join(DTYPES)}; auto is float32 on the CPU.",
    "attention_backend": f"One of {', '.join(ATTENTION_BACKENDS)}.",
    "max_model_len": "Prompt and output tokens of one request; the smaller of context and pool if not given.",
    "max_num_seqs": "Requests that run at once (seats).",
    "max_num_batched_tokens": "Tokens computed in one step (the token budget).",
    "scheduling_policy": f"One of {', '.join(SCHEDULING_POLICIES)}.",
    "block_size": "Slots (token positions) in a block of KV memory.",
    "kv_cache_memory": "Memory for K and V, such as 2GiB; a share of what is free if not given.",
    "num_kv_blocks": "The KV pool in blocks, instead of --kv-cache-memory.",
    "kv": f"When a request gets its KV memory: {', '.join(KV_POLICIES)}.",
    "kv_arena": f"Where reservations come from: {', '.join(KV_ARENAS)}.",
    "enable_prefix_caching": "Share the KV blocks of equal prefixes; on for --kv paged if not given.",
    "random_weights": "Build MODEL from its config.json alone.",
    "skip_tokenizer_init": "Load no tokenizer: prompts are token ids, answers have no text.",
    "seed": "Of the random streams of requests without a seed of their own.",
    "num_threads": "CPU threads; all if not given.",
    "event_log": "Write every event to this file, as JSON lines.",
}


def _engine_options() -> dict[str, inspect.Parameter]:
    """The fields of EngineConfig as options of a command: name, type and default are the field's."""
    kinds = {**get_type_hints(EngineConfig), "kv_cache_memory": str | None}
    options = {}
    for field in fields(EngineConfig):
        if field.name == "model":
            continue
        names = [f"--{field.name.replace('_', '-')}"] if field.default is False else []
        option = typer.Option(*names, help=HELP[field.name], rich_help_panel="Engine")
        options[field.name] = inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kinds[field.name], option],
            default=field.default,
        )
    return options


ENGINE_OPTIONS = _engine_options()


def takes_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the engine's options; it receives them as one `config`. Its `model` parameter is the model."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        options = {name: given.pop(name) for name in ENGINE_OPTIONS}
        if options["kv_cache_memory"] is not None:
            from chairlift.worker.memory import parse_memory

            options["kv_cache_memory"] = parse_memory(options["kv_cache_memory"])
        command(config=EngineConfig(model=given.pop("model"), **options), **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.signature(command, eval_str=True)
    own = [p.replace(kind=keyword) for name, p in signature.parameters.items() if name != "config"]
    parameters = [*own, *ENGINE_OPTIONS.values()]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A folder, a .gguf file or a name on the hub; the default is SmolLM2-135M-Instruct."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="A folder, a .gguf file or a name on the hub; the default is SmolLM2-135M-Instruct."),
]


@app.command()
@takes_engine_options
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
    from chairlift.engine.llm import LLM
    from chairlift.sampling_params import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens)
    llm = LLM.from_config(config)
    if chat and llm.engine.tokenizer.has_chat_template:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in prompt], params)
    else:
        outputs = llm.generate(prompt, params)
    for output in outputs:
        typer.echo(output.outputs[0].text.strip() if chat else f"{output.prompt}{output.outputs[0].text}")
    llm.close()


@app.command()
@takes_engine_options
def serve(
    model: ModelArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="What requests call the model.")] = None,
    *,
    config: EngineConfig,
) -> None:
    """Serve an OpenAI-compatible API: /v1/completions, /v1/chat/completions, /v1/models, /health."""
    started = time.perf_counter()
    _log_to_stderr()
    from chairlift.server.serve import run

    run(config, host, port, served_model_name, started)


@bench.command()
@takes_engine_options
def throughput(
    model: ModelOption = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 64,
    workload_seed: Annotated[int, typer.Option(help="Of lengths, tokens and arrivals.")] = 0,
    prompt_len: Annotated[
        str, typer.Option(help="Prompt tokens: fixed:N, uniform:A..B, exp:MEAN[,A..B], lognormal:MEDIAN,SIGMA[,A..B].")
    ] = "lognormal:96,0.7,16..512",
    output_len: Annotated[str, typer.Option(help="Output tokens, forced; written the same way.")] = "exp:96,8..384",
    request_rate: Annotated[float | None, typer.Option(help="Arrivals a second; all at once if not given.")] = None,
    burstiness: Annotated[float, typer.Option(help="Shape of the gaps between arrivals; 1 is Poisson.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Measured runs.")] = 3,
    num_warmup: Annotated[int, typer.Option(help="Requests of the run before them, not measured.")] = 4,
    *,
    config: EngineConfig,
) -> None:
    """Output tokens/s, latency, batch size and KV use of a seeded load, offline: a table, then one JSON line."""
    _log_to_stderr()
    from chairlift.bench.tables import print_result
    from chairlift.bench.throughput import ThroughputOptions, run_throughput

    options = ThroughputOptions(
        num_prompts, workload_seed, prompt_len, output_len, request_rate, burstiness, repeats, num_warmup
    )
    print_result(run_throughput(config, options))


@app.command()
def fetch() -> None:
    """Put the default model into the model cache."""
    from chairlift.loading.fetch import fetch_default_model

    typer.echo(fetch_default_model())


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def main() -> None:
    """Run the command line; what a user can cause ends with a sentence and exit status 2, not with a traceback."""
    try:
        app()
    except ChairliftError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise SystemExit(2) from None
