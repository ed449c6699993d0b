"""`chairlift bench`: benchmarks of engines, servers, policies and kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import typer

from chairlift.cli.engine_options import ENGINE_OPTIONS, ModelOption, add_engine_options, add_options, log_to_stderr
from chairlift.cli.workload_options import WORKLOAD, WorkloadArguments, add_workload_options
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError

T = TypeVar("T", int, float, str)

bench = typer.Typer(help="Measure engines, servers, policies and kernels.", no_args_is_help=True)


@bench.command()
@add_engine_options
@add_workload_options()
def throughput(
    model: ModelOption = None,
    repeats: Annotated[int, typer.Option(help="Number of measured runs.")] = 3,
    num_warmups: Annotated[int, typer.Option(help="Number of requests in the unmeasured run before them.")] = 4,
    *,
    load: WorkloadArguments,
    config: EngineConfig,
) -> None:
    """Measure throughput, latency, batch size and KV use of an engine under a workload, without HTTP."""
    log_to_stderr()
    from chairlift.lab.bench.throughput import ThroughputOptions, print_throughput, run_throughput

    print_throughput(run_throughput(config, ThroughputOptions(**load, repeats=repeats, num_warmups=num_warmups)))


@bench.command()
@add_engine_options
def latency(
    model: ModelOption = None,
    input_len: Annotated[int, typer.Option(help="Number of prompt tokens of each request.")] = 32,
    output_len: Annotated[int, typer.Option(help="Number of output tokens of each request, forced.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Number of requests, which all arrive at the start.")] = 8,
    num_iters: Annotated[int, typer.Option(help="Number of measured iterations.")] = 10,
    num_iters_warmup: Annotated[
        int, typer.Option(help="Number of unmeasured iterations before the measured ones.")
    ] = 2,
    workload_seed: Annotated[int, typer.Option(help="Seed of the tokens in prompts.")] = 0,
    *,
    config: EngineConfig,
) -> None:
    """Measure the latency of one batch, with prefill and decode separately, without HTTP."""
    log_to_stderr()
    from chairlift.lab.bench.latency import LatencyOptions, print_latency, run_latency

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
"""Options of the engine that `compare` has in another form, or that several engines cannot share."""

DeclaredTokens = Annotated[
    int | None,
    typer.Option(
        help="max_tokens of every request. Default: the largest value that fits --max-model-len.",
        rich_help_panel=WORKLOAD,
    ),
]


@bench.command()
@add_options(name for name in ENGINE_OPTIONS if name not in NOT_FOR_COMPARE)
@add_workload_options(max_tokens=DeclaredTokens)
def compare(
    policies: Annotated[
        str,
        typer.Option(
            help="Policies to compare; the first one is the baseline. paged, exact, max, pow2, oracle: continuous "
            "batching with that KV memory. static, static-global (decoded to the longest output of all requests): with "
            "max. Others: BATCHING/KV, such as static/paged."
        ),
    ] = "static,exact,max,paged",
    model: ModelOption = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="anyscale:CAP\\[/DIVISOR]: published output lengths, divided. Default of --input-len: 512, divided.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    static_batch_size: Annotated[int | None, typer.Option(help="Maximum size of a static batch.")] = None,
    kv_arena: Annotated[str | None, typer.Option(help="Allocator of reservations: buddy, first-fit.")] = None,
    repeats: Annotated[
        int, typer.Option(help="Number of rounds, in which each policy serves the same requests once.")
    ] = 3,
    num_warmups: Annotated[
        int, typer.Option(help="Number of requests in an unmeasured run of each policy before them.")
    ] = 4,
    save_events: Annotated[
        Path | None, typer.Option(help="Folder for one event log of each policy, from the first round.")
    ] = None,
    *,
    load: WorkloadArguments,
    config: EngineConfig,
) -> None:
    """Compare batching and KV policies on one loaded model with equal memory and equal requests."""
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
"""Options of the engine that do not affect the scoring of one window at a time, or exclude it."""


@bench.command()
@add_options(name for name in ENGINE_OPTIONS if name not in NOT_FOR_PERPLEXITY)
def perplexity(
    text: Annotated[
        Path, typer.Option(help="Text file in UTF-8, such as benchmarks/data/alice.txt of the repository.")
    ],
    model: ModelOption = None,
    window: Annotated[int, typer.Option(help="Number of tokens in a window; windows do not overlap.")] = 512,
    num_windows: Annotated[int | None, typer.Option(help="Number of windows. Default: the whole text.")] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Reference: float32 (the same model in float32 on the torch kernels), or the name of another model "
            "with the same vocabulary, run in that way."
        ),
    ] = None,
    *,
    config: EngineConfig,
) -> None:
    """Measure the perplexity of a text, and compare the predictions with a reference."""
    log_to_stderr()
    from chairlift.lab.bench.perplexity import PerplexityOptions, print_perplexity, run_perplexity

    options = PerplexityOptions(text=text, window=window, num_windows=num_windows, against=against)
    print_perplexity(run_perplexity(config, options))


KERNEL_OPTIONS = ("kv_cache_dtype", "block_size", "load_format", "num_threads")
"""Options of the engine that affect its kernels."""


@bench.command()
@add_options(KERNEL_OPTIONS)
def kernels(
    model: ModelOption = None,
    rows: Annotated[str, typer.Option(help="Rows of activations of linear layers.")] = "1,2,4,8,16,32,64,128,256,512",
    formats: Annotated[
        str | None,
        typer.Option(help="Formats of weights: q4_0, q4_1, q8_0, int8, bf16, f16, f32. Default: those of the file."),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Sequences that decode together, and rows to sample.")] = "1,16,64",
    contexts: Annotated[str, typer.Option(help="Tokens in KV memory for attention.")] = "128,1024,4096",
    repeats: Annotated[int, typer.Option(help="Number of measured passes.")] = 7,
    *,
    config: EngineConfig,
) -> None:
    """Measure the native kernels in the shapes of a model, relative to the maximum speed of the CPU."""
    log_to_stderr()
    from chairlift.lab.bench.kernels.benchmark import KernelOptions, run_kernels
    from chairlift.lab.bench.kernels.tables import print_kernels

    options = KernelOptions(
        rows=_values("rows", rows, int),
        formats=None if formats is None else _values("formats", formats, str),
        batch_sizes=_values("batch_sizes", batch_sizes, int),
        contexts=_values("contexts", contexts, int),
        repeats=repeats,
    )
    print_kernels(run_kernels(config, options))


@bench.command()
@add_workload_options(seed="seed")
def serve(
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="MORE_OBJECTIVES")] = None,
    base_url: Annotated[str, typer.Option(help="URL of an OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    backend: Annotated[str, typer.Option(help="API: openai (completions) or openai-chat.")] = "openai",
    model: Annotated[str | None, typer.Option(help="Name of the model. Default: the only model of the server.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of the server.")] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Vocabulary size: token ids in prompts are below this number.", rich_help_panel=WORKLOAD)
    ] = 32000,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model whose tokenizer measures the texts of a trace.", rich_help_panel=WORKLOAD),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Force the output lengths (an extension of the API that vLLM has too).", rich_help_panel=WORKLOAD
        ),
    ] = True,
    num_warmups: Annotated[int, typer.Option(help="Number of unmeasured requests before the workload.")] = 0,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Latency objectives in milliseconds: --goodput ttft:500 tpot:50 e2el:5000.")
    ] = None,
    percentile_metrics: Annotated[str, typer.Option(help="Latencies to report.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to report of each latency.")] = "90,99",
    timeout: Annotated[float, typer.Option(help="Seconds without data after which a request fails.")] = 600.0,
    save_result: Annotated[
        Path | None, typer.Option(help="JSON file to write the result and the record of every request to.")
    ] = None,
    *,
    load: WorkloadArguments,
) -> None:
    """Measure latency, throughput and goodput of a server under a workload, over HTTP."""
    log_to_stderr()
    from chairlift.lab.bench.serving.benchmark import ServeOptions, run_serve
    from chairlift.lab.bench.serving.tables import print_serve
    from chairlift.lab.bench.serving.tables import save_result as write_result

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
        percentile_metrics=_values("percentile_metrics", percentile_metrics, str),
        metric_percentiles=_values("metric_percentiles", metric_percentiles, float),
        timeout=timeout,
    )
    if save_result is not None and not save_result.parent.is_dir():
        raise ConfigError(f"save_result={save_result}: the folder {save_result.parent} does not exist")
    result = run_serve(options, api_key)
    print_serve(result)
    if save_result is not None:
        write_result(result, save_result)
    if not result.metrics.completed:
        raise typer.Exit(1)


def _values(name: str, text: str, kind: type[T]) -> tuple[T, ...]:
    """Parse the values of an option, separated by commas; raises ConfigError."""
    try:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = "integers" if kind is int else "numbers"
        raise ConfigError(f"{name} must be {numbers} separated by commas, got {text!r}") from None
