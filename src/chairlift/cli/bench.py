"""`chairlift bench`: measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.engine_options import ENGINE_OPTIONS, ModelOption, add_engine_options, add_options, log_to_stderr
from chairlift.cli.workload_options import WORKLOAD, WorkloadArguments, add_workload_options
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError

bench = typer.Typer(help="Measure.", no_args_is_help=True)


@bench.command()
@add_engine_options
@add_workload_options()
def throughput(
    model: ModelOption = None,
    repeats: Annotated[int, typer.Option(help="Measured runs.")] = 3,
    num_warmups: Annotated[int, typer.Option(help="Requests of the run before them, not measured.")] = 4,
    *,
    load: WorkloadArguments,
    config: EngineConfig,
) -> None:
    """Output tokens/s, latency, batch size and KV use of a seeded load, offline: a table, then one JSON line."""
    log_to_stderr()
    from chairlift.lab.bench.tables import print_result
    from chairlift.lab.bench.throughput import ThroughputOptions, run_throughput

    print_result(run_throughput(config, ThroughputOptions(**load, repeats=repeats, num_warmups=num_warmups)))


@bench.command()
@add_engine_options
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
    from chairlift.lab.bench.latency import LatencyOptions, run_latency
    from chairlift.lab.bench.tables import print_latency

    options = LatencyOptions(
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        seed=workload_seed,
    )
    print_latency(run_latency(config, options))


NOT_FOR_COMPARE = {"batching", "static_batch_size", "static_run_to", "kv", "kv_arena", "event_log", "record_trace"}
"""Options of an engine that `compare` has in another form, or one run has and several cannot share."""

DeclaredTokens = Annotated[
    int | None,
    typer.Option(
        help="What every request declares at most; what fits --max-model-len if not given.", rich_help_panel=WORKLOAD
    ),
]


@bench.command()
@add_options(name for name in ENGINE_OPTIONS if name not in NOT_FOR_COMPARE)
@add_workload_options(max_tokens=DeclaredTokens)
def compare(
    policies: Annotated[
        str,
        typer.Option(
            help="The first is what the others are compared with. paged, exact, max, pow2, oracle: continuous batching "
            "over that memory; static, static-global (run to the longest output of all): over max; or BATCHING/KV, "
            "such as static/paged."
        ),
    ] = "static,exact,max,paged",
    model: ModelOption = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="anyscale:CAP\\[/DIVISOR]: published output lengths, divided; prompts of 512 tokens, divided, unless "
            "--input-len is given.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    static_batch_size: Annotated[int | None, typer.Option(help="Members of a static batch at most.")] = None,
    kv_arena: Annotated[str | None, typer.Option(help="Where reservations come from: buddy, first-fit.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds: each policy serves the same requests once.")] = 3,
    num_warmups: Annotated[int, typer.Option(help="Requests under every policy before them, not measured.")] = 4,
    save_events: Annotated[
        Path | None, typer.Option(help="A folder for one event log a policy, of the first round: chairlift report.")
    ] = None,
    *,
    load: WorkloadArguments,
    config: EngineConfig,
) -> None:
    """Batching and KV policies at equal memory on one loaded model, in turns: tables, then one JSON line."""
    log_to_stderr()
    from chairlift.lab.bench.compare import CompareOptions, published_lengths, run_compare
    from chairlift.lab.bench.compare_tables import print_compare
    from chairlift.lab.bench.policies import parse_policies

    if workload is not None:
        lengths = published_lengths(workload, load["input_len"], load["output_len"], load["trace"])
        load["input_len"], load["output_len"] = lengths
    options = CompareOptions(
        **load,
        policies=parse_policies(policies),
        static_batch_size=static_batch_size,
        kv_arena=kv_arena,
        repeats=repeats,
        num_warmups=num_warmups,
        save_events=save_events,
    )
    result = run_compare(config, options)
    print_compare(result)
    if not result.is_sound:
        raise typer.Exit(1)


NOT_FOR_PERPLEXITY = {
    "batching",
    "static_batch_size",
    "static_run_to",
    "scheduling_policy",
    "tenant_weights",
    "max_num_seqs",
    "kv",
    "kv_arena",
    "enable_prefix_caching",
    "skip_tokenizer_init",
    "seed",
    "record_trace",
}
"""Options of an engine that change nothing where one window after the other is scored, or stand in its way."""


@bench.command()
@add_options(name for name in ENGINE_OPTIONS if name not in NOT_FOR_PERPLEXITY)
def perplexity(
    text: Annotated[Path, typer.Option(help="A file in UTF-8, such as benchmarks/data/alice.txt of the repository.")],
    model: ModelOption = None,
    window: Annotated[int, typer.Option(help="Tokens that the model sees at once; windows do not overlap.")] = 512,
    num_windows: Annotated[
        int | None, typer.Option(help="Only the first so many; the whole text if not given.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare with float32 (the same model in float32 on the torch kernels), or with another model of the "
            "same vocabulary, run in that way."
        ),
    ] = None,
    *,
    config: EngineConfig,
) -> None:
    """Perplexity of a text; beside a reference, how often the likeliest token is the same, and the divergence."""
    log_to_stderr()
    from chairlift.lab.bench.perplexity import PerplexityOptions, run_perplexity
    from chairlift.lab.bench.perplexity_table import print_perplexity

    options = PerplexityOptions(text=text, window=window, num_windows=num_windows, against=against)
    print_perplexity(run_perplexity(config, options))


KERNEL_OPTIONS = ("kv_cache_dtype", "block_size", "random_weights", "num_threads")
"""Options of an engine that reach its kernels."""


@bench.command()
@add_options(KERNEL_OPTIONS)
def kernels(
    model: ModelOption = None,
    rows: Annotated[str, typer.Option(help="Rows of activations, for linear layers.")] = "1,2,4,8,16,32,64,128,256,512",
    formats: Annotated[
        str | None,
        typer.Option(help="Of weights, side by side: q4_0, q4_1, q8_0, int8, bf16, f16, f32; the file's if not given."),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Sequences that decode at once, and rows to sample.")] = "1,16,64",
    contexts: Annotated[str, typer.Option(help="Tokens in KV memory, for attention.")] = "128,1024,4096",
    repeats: Annotated[int, typer.Option(help="Measured passes over everything.")] = 7,
    *,
    config: EngineConfig,
) -> None:
    """Native kernels over the shapes of a model, beside what this CPU can do: tables, then one JSON line."""
    log_to_stderr()
    from chairlift.lab.bench.kernels.benchmark import KernelOptions, run_kernels
    from chairlift.lab.bench.kernels.tables import print_kernels

    options = KernelOptions(
        rows=_integers("rows", rows),
        formats=None if formats is None else tuple(_parts(formats)),
        batch_sizes=_integers("batch_sizes", batch_sizes),
        contexts=_integers("contexts", contexts),
        repeats=repeats,
    )
    print_kernels(run_kernels(config, options))


@bench.command()
@add_workload_options(seed="seed")
def serve(
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="MORE_OBJECTIVES")] = None,
    base_url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    backend: Annotated[str, typer.Option(help="openai (completions) or openai-chat.")] = "openai",
    model: Annotated[str | None, typer.Option(help="As the server calls it; the server is asked if not given.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as the bearer token.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Prompt tokens are below it.", rich_help_panel=WORKLOAD)] = 32000,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The model whose tokenizer measures the texts of a trace.", rich_help_panel=WORKLOAD),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Force the output lengths (an extension that vLLM has too).", rich_help_panel=WORKLOAD)
    ] = True,
    num_warmups: Annotated[int, typer.Option(help="Requests before the load, not measured.")] = 0,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Objectives in milliseconds: --goodput ttft:500 tpot:50 e2el:5000.")
    ] = None,
    percentile_metrics: Annotated[str, typer.Option(help="Latencies to report.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles of each.")] = "90,99",
    timeout: Annotated[float, typer.Option(help="Seconds of silence after which a request has failed.")] = 600.0,
    save_result: Annotated[Path | None, typer.Option(help="Write the result and every request, as JSON.")] = None,
    *,
    load: WorkloadArguments,
) -> None:
    """Latency, throughput and goodput of a server under a seeded load, over HTTP: tables, then one JSON line."""
    log_to_stderr()
    from chairlift.lab.bench.serving.benchmark import ServeOptions, run_serve
    from chairlift.lab.bench.serving.tables import print_serve, save

    if more_goodput and not goodput:
        raise ConfigError(f"unexpected argument {more_goodput[0]!r}: only --goodput takes several values")
    options = ServeOptions(
        **load,
        base_url=base_url,
        backend=backend,
        model=model,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        ignore_eos=ignore_eos,
        num_warmups=num_warmups,
        goodput=(*(goodput or ()), *(more_goodput or ())),
        percentile_metrics=tuple(_parts(percentile_metrics)),
        metric_percentiles=tuple(_numbers("metric_percentiles", metric_percentiles)),
        timeout=timeout,
    )
    if save_result is not None and not save_result.parent.is_dir():
        raise ConfigError(f"save_result={save_result}: there is no folder {save_result.parent}")
    result = run_serve(options, api_key)
    print_serve(result)
    if save_result is not None:
        save(result, save_result)
    if not result.metrics.completed:
        raise typer.Exit(1)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in _parts(text)]
    except ValueError:
        raise ConfigError(f"{name} must be numbers with commas between them, got {text!r}") from None


def _integers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _parts(text))
    except ValueError:
        raise ConfigError(f"{name} must be integers with commas between them, got {text!r}") from None
