"""`chairlift bench latency`: latency of one batch of requests that all arrive at the start, without HTTP.

Batches of several sizes show the size from which on a larger batch hardly gains output tokens per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

from chairlift.config import EngineConfig
from chairlift.counts import counted
from chairlift.engine.progress import progress_bar
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.errors import ConfigError
from chairlift.events import Event, EventList, RequestArrived, RequestWaiting, Step
from chairlift.lab.bench.bench_options import LatencyOptions
from chairlift.lab.bench.benchmark_result import BenchmarkResult, RunValues, engine_limits, engine_policies
from chairlift.lab.bench.driver import forced_requests, run_forced
from chairlift.lab.metrics.run import ReportedMetric
from chairlift.request import WaitReason

CAPACITY_WAIT_REASONS: Final = {
    WaitReason.SEATS.value: "max_num_seqs seats",
    WaitReason.MEMORY.value: "the KV pool",
    WaitReason.PREEMPTION.value: "the KV pool",
    WaitReason.BATCH.value: "a static batch (static_batch_size, or the pool)",
}
"""By wait reason, the limit that keeps the requests from being one batch. A wait for the token budget is not listed: a
long prefill takes several steps."""

METRICS: Final = (
    ReportedMetric("latency", "latency", "s"),
    ReportedMetric("prefill", "prefill", "ms", 1e3),
    ReportedMetric("decode_per_token", "decode by token", "ms", 1e3),
    ReportedMetric("decode_tokens_per_s", "decode, output tokens", "/s"),
)

CLOSE_TO_BEST: Final = 0.9
"""The share of the highest output tokens per second at which a batch size counts as having nothing more to gain."""


def run_latency(config: EngineConfig, options: LatencyOptions) -> BenchmarkResult:
    """Build the engine, warm it up, and run the batch of each size `options.num_iters` times, alternately.

    Raises:
        ConfigError: an option cannot be honoured, or the requests do not fit the engine as one batch.
        ModelLoadError: the model cannot be loaded.
    """
    log = EventList()
    with closing(build_engine(replace(config, skip_tokenizer_init=True), events=log)) as engine:
        runs = _runs(engine, log, options)
    started = engine.facts.started
    systems = {str(size): values for size, values in runs.items()}
    if len(runs) == 1:
        systems = {started.model: systems.popitem()[1]}
    return BenchmarkResult(
        benchmark="latency",
        title=f"{started.model}: batch size {', '.join(map(str, runs))}; {options.input_len} prompt and "
        f"{options.output_len} output tokens each",
        options=options,
        engines=dict.fromkeys(systems, started),
        runs=systems,
        metrics=METRICS,
        ratios=("decode_tokens_per_s",),
        notes=[
            engine_policies(started),
            engine_limits(started),
            f"{counted(options.num_iters, 'iteration')} after {options.num_iters_warmup} to warm up; "
            "decode: after the prefill",
            *largest_useful_size(runs),
        ],
    )


def _runs(engine: Engine, log: EventList, options: LatencyOptions) -> dict[int, list[RunValues]]:
    """The values of the measured iterations by batch size. No two batches have equal prompts, for the prefix cache."""
    sizes = sorted(set(options.batch_size))
    total = options.num_iters_warmup + options.num_iters
    runs: dict[int, list[RunValues]] = {size: [] for size in sizes}
    vocab_size = engine.facts.model_config.vocab_size
    forced_requests(engine, options.workload(sizes[-1], vocab_size, 0))
    with progress_bar("iterations", total * len(sizes)) as advance:
        for token_round in range(total * len(sizes)):
            size = sizes[token_round % len(sizes)]
            run_forced(engine, log, options.workload(size, vocab_size, token_round))
            _check_one_batch(log.events, options, size)
            times = measure_iteration(log.events)
            decode = times["decode_per_token"]
            runs[size].append(times | {"decode_tokens_per_s": decode and size / decode})
            advance()
    return {size: values[options.num_iters_warmup :] for size, values in runs.items()}


def largest_useful_size(runs: Mapping[int, Sequence[RunValues]]) -> list[str]:
    """A line on the batch size from which on larger ones gain little; empty without several sizes or decode steps.

    The fastest iteration of each size counts: other programs on the machine only make iterations slower.
    """
    speeds = {size: max(run["decode_tokens_per_s"] or 0.0 for run in values) for size, values in runs.items()}
    best = max(speeds.values())
    if len(runs) == 1 or not best:
        return []
    size = next(size for size, speed in speeds.items() if speed >= CLOSE_TO_BEST * best)
    line = f"batch size {size} is the smallest with at least {CLOSE_TO_BEST:.0%} of the highest decode speed (maximum)"
    return [f"{line}; larger ones were not measured" if size == max(runs) else line]


def measure_iteration(events: Sequence[Event]) -> dict[str, float | None]:
    """Compute the times of a batch in seconds from the events of its iteration.

        arrival -- step -- step --+-- step -- step -- ... -- last step
           |-- prefill -----------|                               |
           |-- latency -------------------------------------------|
                                  |-- steps of decode_per_token --|

    Returns:
        latency: from the arrival to the last step.
        prefill: until every request has its first token. If the prompts take several steps, requests whose prompts are
            computed early decode during this time.
        decode_per_token: mean time of the steps after that; None if there are none.
    """
    steps = [event for event in events if isinstance(event, Step)]
    start = min(event.time for event in events if isinstance(event, RequestArrived))
    first_token: dict[str, float] = {}
    for step in steps:
        for request_id, num_new in zip(step.request_ids, step.num_new, strict=True):
            if num_new:
                first_token.setdefault(request_id, step.time)
    prefilled, end = max(first_token.values()), steps[-1].time
    num_decoded: Counter[str] = Counter()
    for step in steps:
        if step.time > prefilled:
            num_decoded.update(dict(zip(step.request_ids, step.num_new, strict=True)))
    num_tokens = max(num_decoded.values(), default=0)
    decode = (end - prefilled) / num_tokens if num_tokens else None
    return {"latency": end - start, "prefill": prefilled - start, "decode_per_token": decode}


def _check_one_batch(events: Sequence[Event], options: LatencyOptions, batch_size: int) -> None:
    batch = f"batch_size={batch_size} requests of {options.input_len} + {options.output_len} tokens"
    for event in events:
        if isinstance(event, RequestWaiting) and event.reason in CAPACITY_WAIT_REASONS:
            raise ConfigError(
                f"{batch} do not fit {CAPACITY_WAIT_REASONS[event.reason]} at once: {event.num_running} run, and the "
                f"next one needs {counted(event.needed_blocks, 'block')} of {event.free_blocks} free ones. Reduce "
                f"batch_size, or raise that limit."
            )
    if any(isinstance(event, Step) and event.preempted for event in events):
        raise ConfigError(f"{batch} outgrow the KV pool: reduce batch_size, or enlarge the pool.")
