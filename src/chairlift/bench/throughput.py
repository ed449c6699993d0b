"""Throughput and latency of one engine under a synthetic load, offline: no HTTP, no detokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from chairlift.bench.driver import drive, drive_all_at_once, forced_requests
from chairlift.bench.machine import MachineFacts, machine_facts, peak_rss_bytes
from chairlift.config import EngineConfig
from chairlift.engine.factory import Engine, build_engine
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, EventList
from chairlift.metrics.percentile import Summary
from chairlift.metrics.run import RunMetrics, summarize
from chairlift.workload.arrivals import arrival_process
from chairlift.workload.lengths import parse_lengths
from chairlift.workload.synthetic import WorkloadRequest, make_workload

logger = logging.getLogger("chairlift")

WARM_UP_ROUND = 0


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """The load.

    Attributes:
        prompt_len, output_len: distributions, as `chairlift.workload.lengths` writes them. Prompts are random tokens;
            output lengths are forced (greedy, end-of-sequence ignored).
        request_rate: arrivals a second; None: all at once. burstiness: shape of the gaps, 1 is Poisson.
        repeats: measured runs, each with the same lengths and arrivals and with tokens of its own.
        num_warmup: requests of the run before them, which is not measured.

    Raises:
        ConfigError: naming the option, the value and the limit.
    """

    num_prompts: int = 64
    seed: int = 0
    prompt_len: str = "lognormal:96,0.7,16..512"
    output_len: str = "exp:96,8..384"
    request_rate: float | None = None
    burstiness: float = 1.0
    repeats: int = 3
    num_warmup: int = 4

    def __post_init__(self) -> None:
        for name, low in (("num_prompts", 1), ("seed", 0), ("repeats", 1), ("num_warmup", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        arrival_process(self.request_rate, self.burstiness)
        parse_lengths(self.prompt_len)
        parse_lengths(self.output_len)

    def workload(self, vocab_size: int, token_round: int) -> list[WorkloadRequest]:
        """The requests of one run."""
        return make_workload(
            self.seed,
            self.num_prompts,
            parse_lengths(self.prompt_len),
            parse_lengths(self.output_len),
            arrival_process(self.request_rate, self.burstiness),
            vocab_size,
            token_round=token_round,
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over the repeats."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report: what, in which unit (after `scale`), and where a run has it."""

    key: str
    label: str
    unit: str
    value: Callable[[RunMetrics], float | None]
    scale: float = 1.0


def _p(percent: int, summary: Callable[[RunMetrics], Summary | None]) -> Callable[[RunMetrics], float | None]:
    return lambda run: None if (s := summary(run)) is None else float(getattr(s, f"p{percent}"))


FIGURES = (
    Figure("output_tokens_per_s", "output tokens", "/s", lambda run: run.output_tokens_per_s),
    Figure("total_tokens_per_s", "prompt and output tokens", "/s", lambda run: run.total_tokens_per_s),
    Figure("requests_per_s", "requests", "/s", lambda run: run.requests_per_s),
    Figure("e2e_latency_p50", "E2E latency p50", "s", _p(50, lambda run: run.e2e_latency)),
    Figure("e2e_latency_p99", "E2E latency p99", "s", _p(99, lambda run: run.e2e_latency)),
    Figure("ttft_p50", "TTFT p50", "s", _p(50, lambda run: run.ttft)),
    Figure("ttft_p99", "TTFT p99", "s", _p(99, lambda run: run.ttft)),
    Figure("itl_p50", "ITL p50", "ms", _p(50, lambda run: run.itl), 1e3),
    Figure("itl_p99", "ITL p99", "ms", _p(99, lambda run: run.itl), 1e3),
    Figure("mean_batch_size", "batch, mean", "requests", lambda run: run.mean_batch_size),
    Figure("mean_batch_tokens", "step, mean", "tokens", lambda run: run.mean_batch_tokens),
    Figure("kv_use_mean", "KV blocks held, mean", "%", lambda run: run.kv_use_mean, 100),
    Figure("kv_use_peak", "KV blocks held, peak", "%", lambda run: run.kv_use_peak, 100),
    Figure("preemptions", "preemptions", "", lambda run: run.preemptions),
    Figure("cached_tokens", "prompt tokens from the prefix cache", "", lambda run: run.cached_tokens),
)


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """What `run_throughput` measured, and on what."""

    machine: MachineFacts
    engine: EngineStarted
    options: ThroughputOptions
    runs: list[RunMetrics]
    peak_rss_bytes: int | None

    def spread(self, figure: Figure) -> Spread | None:
        """The figure over the repeats, unscaled; None if a run does not have it."""
        values = [value for run in self.runs if (value := figure.value(run)) is not None]
        if len(values) < len(self.runs):
            return None
        return Spread(median(values), min(values), max(values))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; seconds, bytes and shares, whatever the units of the table."""
        spreads = {figure.key: self.spread(figure) for figure in FIGURES}
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
        started = log.events[0]
        assert isinstance(started, EngineStarted)
        vocab_size = engine.model_config.vocab_size
        workloads = [options.workload(vocab_size, WARM_UP_ROUND + i) for i in range(options.repeats + 1)]
        for workload in workloads:
            forced_requests(engine, workload)
        drive_all_at_once(engine, workloads[0][: options.num_warmup])
        runs: list[RunMetrics] = []
        for number, workload in enumerate(workloads[1:], start=1):
            runs.append(_run(engine, log, workload))
            speed = runs[-1].output_tokens_per_s
            logger.info("run %d of %d: %.1f output tokens/s", number, options.repeats, speed)
    finally:
        engine.close()
    return ThroughputResult(machine_facts(), started, options, runs, peak_rss_bytes())


def _run(engine: Engine, log: EventList, workload: Sequence[WorkloadRequest]) -> RunMetrics:
    """One run to its end; its events replace those of the run before."""
    del log.events[1:]
    tokens = drive(engine.core, forced_requests(engine, workload))
    for item in workload:
        assert len(tokens[item.request_id]) == item.output_len, "a forced length was missed"
    return summarize(log.events)
