"""`chairlift bench throughput`: throughput and latency of one engine under a workload, without HTTP."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import build_engine
from chairlift.events import EventList
from chairlift.lab.bench.bench_options import ThroughputOptions
from chairlift.lab.bench.benchmark_result import BenchmarkResult, RunValues, engine_limits, engine_policies
from chairlift.lab.bench.driver import drive_all_at_once, forced_requests, run_forced
from chairlift.lab.bench.workload_options import format_arrivals, format_lengths, text_tokenizer
from chairlift.lab.metrics.run import REPORTED_METRICS, summarize

logger = logging.getLogger("chairlift")


def run_throughput(config: EngineConfig, options: ThroughputOptions) -> BenchmarkResult:
    """Build the engine, warm it up, and run the workload `options.repeats` times.

    Raises:
        ConfigError: an option cannot be honoured, or a request of the workload does not fit the engine.
        ModelLoadError: the model cannot be loaded.
    """
    log = EventList()
    tokenize = None if config.skip_tokenizer_init else text_tokenizer(config.model)
    runs: list[RunValues] = []
    with closing(build_engine(replace(config, skip_tokenizer_init=True), events=log)) as engine:
        vocab_size, limit = engine.facts.model_config.vocab_size, engine.facts.scheduler_config.max_model_len
        warm_up = options.workload(vocab_size, 0, tokenize, limit)
        forced_requests(engine, warm_up)
        drive_all_at_once(engine, warm_up[: options.num_warmups])
        for run_number in range(1, options.repeats + 1):
            workload = options.workload(vocab_size, run_number, tokenize, limit)
            run_forced(engine, log, workload, options.max_concurrency)
            run = summarize(log.events)
            runs.append(run.values())
            speed = run.output_tokens_per_s
            logger.info("run %d of %d: %.1f output tokens/s", run_number, options.repeats, speed)
    started = engine.facts.started
    return BenchmarkResult(
        benchmark="throughput",
        title=f"{started.model}: {run.num_requests} requests {format_arrivals(options)}, {run.prompt_tokens:,} prompt "
        f"and {run.output_tokens:,} output tokens, {len(runs)} runs",
        options=options,
        engines={started.model: started},
        runs={started.model: runs},
        metrics=REPORTED_METRICS,
        notes=[engine_policies(started), engine_limits(started), format_lengths(options)],
    )
