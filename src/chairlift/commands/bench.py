"""`chairlift bench`: measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.commands.options import ModelOption, log_to_stderr, takes_engine_options
from chairlift.config import EngineConfig

bench = typer.Typer(help="Measure.", no_args_is_help=True)

LOAD = "Load"
NumPrompts = Annotated[
    int | None, typer.Option(help="Requests: 64 if not given; of a trace the first ones.", rich_help_panel=LOAD)
]
LoadSeed = Annotated[int, typer.Option(help="Of lengths, tokens and arrivals.", rich_help_panel=LOAD)]
PromptLen = Annotated[
    str | None,
    typer.Option(
        help="Prompt tokens: fixed:N, uniform:A..B, exp:MEAN[,A..B] or lognormal:MEDIAN,SIGMA[,A..B]; "
        "lognormal:96,0.7,16..512 if not given.",
        rich_help_panel=LOAD,
    ),
]
OutputLen = Annotated[
    str | None,
    typer.Option(help="Output tokens, written the same way; exp:96,8..384 if not given.", rich_help_panel=LOAD),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="What every request declares at most; its true length if not given.", rich_help_panel=LOAD),
]
RequestRate = Annotated[
    float | None,
    typer.Option(help="Arrivals a second; inf, or no rate and no trace: all at once.", rich_help_panel=LOAD),
]
Burstiness = Annotated[
    float, typer.Option(help="Shape of the gaps between arrivals; 1 is Poisson.", rich_help_panel=LOAD)
]
MaxConcurrency = Annotated[
    int | None, typer.Option(help="Requests that are out at once, at most (closed loop).", rich_help_panel=LOAD)
]
Trace = Annotated[
    Path | None, typer.Option(help="A recorded load, instead of lengths and arrivals.", rich_help_panel=LOAD)
]


@bench.command()
@takes_engine_options
def throughput(
    model: ModelOption = None,
    num_prompts: NumPrompts = None,
    workload_seed: LoadSeed = 0,
    prompt_len: PromptLen = None,
    output_len: OutputLen = None,
    max_tokens: MaxTokens = None,
    request_rate: RequestRate = None,
    burstiness: Burstiness = 1.0,
    max_concurrency: MaxConcurrency = None,
    trace: Trace = None,
    repeats: Annotated[int, typer.Option(help="Measured runs.")] = 3,
    num_warmup: Annotated[int, typer.Option(help="Requests of the run before them, not measured.")] = 4,
    *,
    config: EngineConfig,
) -> None:
    """Output tokens/s, latency, batch size and KV use of a seeded load, offline: a table, then one JSON line."""
    log_to_stderr()
    from chairlift.bench.tables import print_result
    from chairlift.bench.throughput import ThroughputOptions, run_throughput

    options = ThroughputOptions(
        num_prompts=num_prompts,
        seed=workload_seed,
        prompt_len=prompt_len,
        output_len=output_len,
        max_tokens=max_tokens,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        trace=trace,
        repeats=repeats,
        num_warmup=num_warmup,
    )
    print_result(run_throughput(config, options))


@bench.command()
@takes_engine_options
def latency(
    model: ModelOption = None,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each request.")] = 32,
    output_len: Annotated[int, typer.Option(help="Output tokens of each request, forced.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Requests, all there at the start.")] = 8,
    num_iters: Annotated[int, typer.Option(help="Measured iterations.")] = 10,
    num_iters_warmup: Annotated[int, typer.Option(help="Iterations before them, not measured.")] = 2,
    workload_seed: Annotated[int, typer.Option(help="Of the prompts' tokens.")] = 0,
    *,
    config: EngineConfig,
) -> None:
    """Seconds of one batch from its start to its end, prefill and decode apart: a table, then one JSON line."""
    log_to_stderr()
    from chairlift.bench.latency import LatencyOptions, run_latency
    from chairlift.bench.tables import print_latency

    options = LatencyOptions(
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        seed=workload_seed,
    )
    print_latency(run_latency(config, options))
