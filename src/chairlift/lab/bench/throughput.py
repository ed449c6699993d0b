"""Throughput and latency of one engine under a load, offline: no HTTP, no detokenizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.events import EngineStarted, EventList
from chairlift.lab.bench.driver import drive, drive_all_at_once, forced_requests
from chairlift.lab.bench.load import LoadOptions, Tokenize, at_least, first_requests, text_tokenizer
from chairlift.lab.bench.machine import MachineFacts, machine_facts, peak_rss_bytes
from chairlift.lab.metrics.reported_metrics import REPORTED_METRICS, ReportedMetric
from chairlift.lab.metrics.run import RunMetrics, summarize
from chairlift.lab.workload.request import WorkloadRequest

logger = logging.getLogger("chairlift")

WARM_UP_ROUND = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(LoadOptions):
    """A load whose prompts are random tokens and whose output lengths are forced (greedy, end-of-sequence ignored).

    Attributes:
        repeats: measured runs, each with the same lengths and arrivals and with tokens of its own.
        num_warmup: requests of the run before them, which is not measured.
    """

    repeats: int = 3
    num_warmup: int = 4

    def __post_init__(self) -> None:
        LoadOptions.__post_init__(self)
        at_least("repeats", self.repeats, 1)
        at_least("num_warmup", self.num_warmup, 0)


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over the repeats."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """What `run_throughput` measured, and on what."""

    machine: MachineFacts
    engine: EngineStarted
    options: ThroughputOptions
    runs: list[RunMetrics]
    peak_rss_bytes: int | None

    def spread(self, metric: ReportedMetric) -> Spread | None:
        """The metric over the repeats, unscaled; None if a run does not have it."""
        values = [value for run in self.runs if (value := metric.value(run)) is not None]
        if len(values) < len(self.runs):
            return None
        return Spread(median(values), min(values), max(values))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; seconds, bytes and shares, whatever the units of the table."""
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
        ConfigError: an option that cannot be honoured, or a workload with a request that does not fit the engine.
        ModelLoadError: the model cannot be had.
    """
    log = EventList()
    engine = build_engine(replace(config, skip_tokenizer_init=True), events=log)
    try:
        vocab_size, tokenize = engine.model_config.vocab_size, _tokenize(config)
        warm_up = options.workload(vocab_size, WARM_UP_ROUND, tokenize)
        forced_requests(engine, warm_up)
        drive_all_at_once(engine, first_requests(warm_up, options.num_warmup))
        runs: list[RunMetrics] = []
        for number in range(1, options.repeats + 1):
            workload = options.workload(vocab_size, WARM_UP_ROUND + number, tokenize)
            runs.append(_run(engine, log, workload, options.max_concurrency))
            speed = runs[-1].output_tokens_per_s
            logger.info("run %d of %d: %.1f output tokens/s", number, options.repeats, speed)
    finally:
        engine.close()
    return ThroughputResult(machine_facts(), engine.started, options, runs, peak_rss_bytes())


def _tokenize(config: EngineConfig) -> Tokenize | None:
    """The engine computes on token ids; only a trace of texts needs the tokenizer."""
    return None if config.skip_tokenizer_init else text_tokenizer(config.model)


def _run(
    engine: Engine, log: EventList, workload: Sequence[WorkloadRequest], max_concurrency: int | None
) -> RunMetrics:
    """One run to its end; its events replace those of the run before."""
    del log.events[1:]
    tokens = drive(engine, workload, max_concurrency)
    for item in workload:
        assert len(tokens[item.request_id]) == item.output_len, "a forced length was missed"
    return summarize(log.events)
