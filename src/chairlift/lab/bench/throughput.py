"""`chairlift bench throughput`: throughput and latency of one engine under a workload, without HTTP."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.events import EngineStarted, EventList
from chairlift.lab.bench.distribution import MeasuredRange
from chairlift.lab.bench.driver import drive, drive_all_at_once, forced_requests
from chairlift.lab.bench.machine import MachineFacts, machine_caption, machine_facts, peak_rss_bytes
from chairlift.lab.bench.workload_options import (
    WorkloadOptions,
    check_minimums,
    first_requests,
    format_arrivals,
    format_lengths,
    text_tokenizer,
)
from chairlift.lab.metrics.run import REPORTED_METRICS, ReportedMetric, RunMetrics, summarize
from chairlift.lab.tables import make_table, number, print_report, row_label
from chairlift.lab.workload.request import WorkloadRequest

logger = logging.getLogger("chairlift")

WARM_UP_ROUND = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(WorkloadOptions):
    """A workload of greedy requests with random prompts and forced output lengths, and the number of runs.

    `chairlift bench throughput --help` describes each field. All runs have the same lengths and arrivals; their tokens
    differ.
    """

    repeats: int = 3
    num_warmups: int = 4

    def __post_init__(self) -> None:
        WorkloadOptions.__post_init__(self)
        check_minimums(self, repeats=1, num_warmups=0)


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """The metrics of the runs, with the machine, the engine and the workload that they belong to."""

    machine: MachineFacts
    engine: EngineStarted
    options: ThroughputOptions
    runs: list[RunMetrics]
    peak_rss_bytes: int | None

    def spread(self, metric: ReportedMetric) -> MeasuredRange | None:
        """The unscaled metric over the runs; None if a run does not have it."""
        return MeasuredRange.from_values([metric.value(run) for run in self.runs])

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, in seconds, bytes and shares."""
        spreads = {metric.key: self.spread(metric) for metric in REPORTED_METRICS}
        return {
            "benchmark": "throughput",
            "machine": self.machine.to_dict(),
            "engine": asdict(self.engine),
            "workload": asdict(self.options),
            "results": {key: spread and asdict(spread) for key, spread in spreads.items()},
            "peak_rss_bytes": self.peak_rss_bytes,
            "runs": [run.to_dict() for run in self.runs],
        }


def run_throughput(config: EngineConfig, options: ThroughputOptions) -> ThroughputResult:
    """Build the engine, warm it up, and run the workload `options.repeats` times.

    Raises:
        ConfigError: an option cannot be honoured, or a request of the workload does not fit the engine.
        ModelLoadError: the model cannot be loaded.
    """
    log = EventList()
    engine = build_engine(replace(config, skip_tokenizer_init=True), events=log)
    tokenize = None if config.skip_tokenizer_init else text_tokenizer(config.model)
    try:
        vocab_size = engine.facts.model_config.vocab_size
        warm_up = options.workload(vocab_size, WARM_UP_ROUND, tokenize)
        forced_requests(engine, warm_up)
        drive_all_at_once(engine, first_requests(warm_up, options.num_warmups))
        runs: list[RunMetrics] = []
        for run_number in range(1, options.repeats + 1):
            workload = options.workload(vocab_size, WARM_UP_ROUND + run_number, tokenize)
            runs.append(_run(engine, log, workload, options.max_concurrency))
            speed = runs[-1].output_tokens_per_s
            logger.info("run %d of %d: %.1f output tokens/s", run_number, options.repeats, speed)
    finally:
        engine.close()
    return ThroughputResult(machine_facts(), engine.facts.started, options, runs, peak_rss_bytes())


def _run(
    engine: Engine, log: EventList, workload: Sequence[WorkloadRequest], max_concurrency: int | None
) -> RunMetrics:
    """Run the workload to its end; its events replace those of the previous run in the log."""
    del log.events[1:]
    tokens = drive(engine, workload, max_concurrency)
    for item in workload:
        assert len(tokens[item.request_id]) == item.output_len, "a request has not the forced number of tokens"
    return summarize(log.events)


def print_throughput(result: ThroughputResult, file: TextIO | None = None, as_json: bool = False) -> None:
    """Write a table with the median and the range of every metric, or the JSON line, to `file`."""
    run = result.runs[0]
    title = (
        f"{result.engine.model}: {run.num_requests} requests {format_arrivals(result.options)}, "
        f"{run.prompt_tokens:,} prompt and {run.output_tokens:,} output tokens, {len(result.runs)} runs"
    )
    caption = engine_caption(result.machine, result.engine, result.peak_rss_bytes)
    table = make_table(title, ["", "median", "min", "max"], f"{caption}\n{format_lengths(result.options)}")
    for metric in REPORTED_METRICS:
        if (spread := result.spread(metric)) is not None:
            values = (spread.median, spread.min, spread.max)
            table.add_row(row_label(metric.label, metric.unit), *(number(value * metric.scale) for value in values))
    print_report([table], result.to_dict(), file, as_json)


def engine_caption(machine: MachineFacts, engine: EngineStarted, peak_rss_bytes: int | None) -> str:
    """Three lines for a caption: the machine, the versions, and the limits and policies of the engine."""
    return (
        f"{machine_caption(machine, peak_rss_bytes)}\n"
        f"{engine.batching} batching, kv {engine.kv}, KV pool {engine.num_blocks} blocks of {engine.block_size}, "
        f"max_num_seqs {engine.max_num_seqs}, max_num_batched_tokens {engine.max_num_batched_tokens}, "
        f"max_model_len {engine.max_model_len}, prefix cache {'on' if engine.enable_prefix_caching else 'off'}"
    )
