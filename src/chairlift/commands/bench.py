"""`chairlift bench`: measure."""

from __future__ import annotations

from typing import Annotated

import typer

from chairlift.commands.options import ModelOption, log_to_stderr, takes_engine_options
from chairlift.config import EngineConfig

bench = typer.Typer(help="Measure.", no_args_is_help=True)


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
    log_to_stderr()
    from chairlift.bench.tables import print_result
    from chairlift.bench.throughput import ThroughputOptions, run_throughput

    options = ThroughputOptions(
        num_prompts, workload_seed, prompt_len, output_len, request_rate, burstiness, repeats, num_warmup
    )
    print_result(run_throughput(config, options))
