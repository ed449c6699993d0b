"""`chairlift bench`: benchmarks of engines and policies."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App

from chairlift.cli.console import OPTIONS, SAMPLING_DEFAULTS, Json, prepare_engine
from chairlift.config import EngineConfig
from chairlift.lab.bench.bench_options import CompareOptions, LatencyOptions, PerplexityOptions, ThroughputOptions
from chairlift.option_sources import with_options
from chairlift.options import Selection

bench = App(name="bench", group_parameters=OPTIONS)

BenchedEngine = Annotated[EngineConfig, Selection(without=SAMPLING_DEFAULTS)]


@bench.command
@with_options
def throughput(*, as_json: Json = False, options: ThroughputOptions, config: BenchedEngine) -> None:
    """Measure throughput, latency, batch size and KV use of an engine under a workload, without HTTP."""
    prepare_engine()
    from chairlift.lab.bench.throughput import run_throughput

    run_throughput(config, options).print(as_json)


@bench.command
@with_options
def latency(*, as_json: Json = False, options: LatencyOptions, config: BenchedEngine) -> None:
    """Measure the latency of batches of one size or several, with prefill and decode separately, without HTTP."""
    prepare_engine()
    from chairlift.lab.bench.latency import run_latency

    run_latency(config, options).print(as_json)


NOT_FOR_COMPARE = ("batching", "static_batch_size", "static_run_to", "kv", "kv_arena", "event_log", "record_trace")
"""Options of the engine that `compare` has in another form, or that several engines cannot share."""


@bench.command
@with_options
def compare(
    *,
    as_json: Json = False,
    options: CompareOptions,
    config: Annotated[EngineConfig, Selection(without=(*SAMPLING_DEFAULTS, *NOT_FOR_COMPARE))],
) -> None:
    """Compare batching and KV policies on one loaded model with equal memory and equal requests."""
    prepare_engine()
    from chairlift.lab.bench.compare import run_compare

    result, tokens = run_compare(config, options)
    result.print(as_json, tokens.describe())
    if not tokens.is_sound:
        raise SystemExit(1)


NOT_FOR_PERPLEXITY = (
    "batching",
    "static_batch_size",
    "static_run_to",
    "scheduling_policy",
    "tenant_weights",
    "pacing_tokens_per_second",
    "length_predictor",
    "max_num_seqs",
    "kv",
    "kv_arena",
    "enable_prefix_caching",
    "skip_tokenizer_init",
    "speculative_config",
    "seed",
    "record_trace",
)
"""Options of the engine that do not affect the scoring of one window at a time, or exclude it."""


@bench.command
@with_options
def perplexity(
    *,
    as_json: Json = False,
    options: PerplexityOptions,
    config: Annotated[EngineConfig, Selection(without=(*SAMPLING_DEFAULTS, *NOT_FOR_PERPLEXITY))],
) -> None:
    """Measure the perplexity of a text, and compare the predictions with a reference."""
    prepare_engine()
    from chairlift.lab.bench.perplexity import run_perplexity

    run_perplexity(config, options).print(as_json)
