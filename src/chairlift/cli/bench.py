"""`chairlift bench`: benchmarks of engines, policies and kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.commands import Commands
from chairlift.cli.engine_options import ENGINE_OPTIONS, ModelOption, add_engine_options, add_options, log_to_stderr
from chairlift.cli.option_groups import JSON, OptionValues, add_group
from chairlift.cli.workload_options import add_workload_options
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError

bench = Commands(help="Measure engines, policies and kernels.", no_args_is_help=True)


@bench.command()
@add_engine_options
@add_workload_options()
@add_group(
    repeats=(int, "Number of measured runs.", 3),
    num_warmups=(int, "Number of requests in the unmeasured run before them.", 4),
    json=JSON,
)
def throughput(model: ModelOption = None, *, options: OptionValues, load: OptionValues, config: EngineConfig) -> None:
    """Measure throughput, latency, batch size and KV use of an engine under a workload, without HTTP."""
    log_to_stderr()
    from chairlift.lab.bench.benchmark_result import print_benchmark
    from chairlift.lab.bench.throughput import ThroughputOptions, run_throughput

    as_json = options.pop("json")
    print_benchmark(run_throughput(config, ThroughputOptions(**load, **options)), as_json=as_json)


@bench.command()
@add_engine_options
@add_group(
    input_len=(int, "Number of prompt tokens of each request.", 32),
    output_len=(int, "Number of output tokens of each request, forced.", 128),
    batch_size=(int, "Number of requests, which all arrive at the start.", 8),
    num_iters=(int, "Number of measured iterations.", 10),
    num_iters_warmup=(int, "Number of unmeasured iterations before the measured ones.", 2),
    workload_seed=(int, "Seed of the tokens in prompts.", 0),
    json=JSON,
)
def latency(model: ModelOption = None, *, options: OptionValues, config: EngineConfig) -> None:
    """Measure the latency of one batch, with prefill and decode separately, without HTTP."""
    log_to_stderr()
    from chairlift.lab.bench.benchmark_result import print_benchmark
    from chairlift.lab.bench.latency import LatencyOptions, run_latency

    options["seed"] = options.pop("workload_seed")
    as_json = options.pop("json")
    print_benchmark(run_latency(config, LatencyOptions(**options)), as_json=as_json)


NOT_FOR_COMPARE = {"batching", "static_batch_size", "static_run_to", "kv", "kv_arena", "event_log", "record_trace"}
"""Options of the engine that `compare` has in another form, or that several engines cannot share."""


@bench.command()
@add_options(name for name in ENGINE_OPTIONS if name not in NOT_FOR_COMPARE)
@add_workload_options(max_tokens="max_tokens of every request. Default: the largest value that fits --max-model-len.")
@add_group(
    static_batch_size=(int | None, "Maximum size of a static batch."),
    kv_arena=(str | None, "Allocator of reservations: buddy, first-fit."),
    repeats=(int, "Number of rounds, in which each policy serves the same requests once.", 3),
    num_warmups=(int, "Number of requests in an unmeasured run of each policy before them.", 4),
    save_events=(Path | None, "Folder for one event log of each policy, from the first round."),
    json=JSON,
)
def compare(
    policies: Annotated[
        str,
        typer.Option(
            help="Policies to compare; the first one is the baseline. paged, exact, max, pow2, oracle: continuous "
            "batching with this KV policy. static, and static-global (decoded to the longest output of all requests), "
            "use the KV policy max. BATCHING/KV combines others, such as static/paged."
        ),
    ] = "static,exact,max,paged",
    model: ModelOption = None,
    *,
    options: OptionValues,
    load: OptionValues,
    config: EngineConfig,
) -> None:
    """Compare batching and KV policies on one loaded model with equal memory and equal requests."""
    log_to_stderr()
    from chairlift.lab.bench.compare import CompareOptions, print_compare, run_compare
    from chairlift.lab.bench.policies import parse_policies

    as_json = options.pop("json")
    result = run_compare(config, CompareOptions(**load, **options, policies=parse_policies(policies)))
    print_compare(result, as_json=as_json)
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
    "speculative_config",
    "seed",
    "record_trace",
}
"""Options of the engine that do not affect the scoring of one window at a time, or exclude it."""


@bench.command()
@add_options(name for name in ENGINE_OPTIONS if name not in NOT_FOR_PERPLEXITY)
@add_group(
    window=(int, "Number of tokens in a window; windows do not overlap.", 512),
    num_windows=(int | None, "Number of windows. Default: the whole text."),
    against=(
        str | None,
        "Reference: float32 (the same model in float32 on the torch kernels), or the name of another model with the "
        "same vocabulary, run in that way.",
    ),
    json=JSON,
)
def perplexity(
    text: Annotated[
        Path, typer.Option(help="Text file in UTF-8, such as benchmarks/data/alice.txt of the repository.")
    ],
    model: ModelOption = None,
    *,
    options: OptionValues,
    config: EngineConfig,
) -> None:
    """Measure the perplexity of a text, and compare the predictions with a reference."""
    log_to_stderr()
    from chairlift.lab.bench.perplexity import PerplexityOptions, print_perplexity, run_perplexity

    as_json = options.pop("json")
    print_perplexity(run_perplexity(config, PerplexityOptions(text=text, **options)), as_json=as_json)


KERNEL_OPTIONS = ("kv_cache_dtype", "block_size", "load_format", "num_threads")
"""Options of the engine that affect its kernels."""


@bench.command()
@add_options(KERNEL_OPTIONS)
@add_group(
    rows=(str, "Rows of activations of linear layers.", "1,2,4,8,16,32,64,128,256,512"),
    formats=(
        str | None,
        "Formats of weights: int8, bf16, f16, f32, or GGUF blocks (q4_k). Default: those of the file.",
    ),
    batch_sizes=(str, "Sequences that decode together, and rows to sample.", "1,16,64"),
    contexts=(str, "Tokens in KV memory for attention.", "128,1024,4096"),
    repeats=(int, "Number of measured passes.", 7),
    json=JSON,
)
def kernels(model: ModelOption = None, *, options: OptionValues, config: EngineConfig) -> None:
    """Measure the native kernels in the shapes of a model, relative to the maximum speed of the CPU."""
    log_to_stderr()
    from chairlift.lab.bench.kernels.benchmark import KernelOptions, run_kernels
    from chairlift.lab.bench.kernels.tables import print_kernels

    _split_values(options, int, "rows", "batch_sizes", "contexts")
    if options["formats"] is not None:
        _split_values(options, str, "formats")
    as_json = options.pop("json")
    print_kernels(run_kernels(config, KernelOptions(**options)), as_json=as_json)


def _split_values(options: OptionValues, kind: type[int | str], *names: str) -> None:
    """Replace the text of these options by a tuple of the values that it has, separated by commas.

    Raises:
        ConfigError: a value has another type.
    """
    for name in names:
        try:
            options[name] = tuple(kind(part.strip()) for part in options[name].split(",") if part.strip())
        except ValueError:
            raise ConfigError(f"{name} must be integers separated by commas, got {options[name]!r}") from None
