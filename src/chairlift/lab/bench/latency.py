"""Latency of one batch, offline: everybody is there at the start, and nobody joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, Event, EventList, RequestArrived, RequestWaiting, Step
from chairlift.lab.bench.distribution import Distribution
from chairlift.lab.bench.driver import drive, forced_requests
from chairlift.lab.bench.load import at_least
from chairlift.lab.bench.machine import MachineFacts, machine_facts, peak_rss_bytes
from chairlift.lab.workload.arrivals import BurstArrivals
from chairlift.lab.workload.lengths import FixedLength
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload
from chairlift.request import WaitReason
from chairlift.server.batch.progress import progress_bar

TOO_SMALL = {
    WaitReason.SEATS.value: "max_num_seqs seats",
    WaitReason.MEMORY.value: "the KV pool",
    WaitReason.PREEMPTION.value: "the KV pool",
    WaitReason.BATCH.value: "a static batch (static_batch_size, or the pool)",
}
"""Reasons to wait that mean that the requests were not one batch, and what they did not fit into. Waiting for the token
budget is none: a long prefill takes several steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """The batch.

    Attributes:
        input_len, output_len: tokens of each request; prompts are random, outputs forced (greedy).
        num_iters: measured iterations, each with tokens of its own; num_iters_warmup: before them, not measured.
        seed: of the tokens.

    Raises:
        ConfigError: naming the option, the value and the limit.
    """

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    num_iters: int = 10
    num_iters_warmup: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "batch_size", "num_iters"):
            at_least(name, getattr(self, name), 1)
        for name in ("num_iters_warmup", "seed"):
            at_least(name, getattr(self, name), 0)

    def workload(self, vocab_size: int, token_round: int) -> list[WorkloadRequest]:
        """The batch of one iteration."""
        prompt, output = FixedLength(self.input_len), FixedLength(self.output_len)
        return make_workload(
            self.seed, self.batch_size, prompt, output, BurstArrivals(), vocab_size, token_round=token_round
        )


@dataclass(frozen=True, slots=True)
class Iteration:
    """One batch, in seconds.

        arrival -- step -- step --+-- step -- step -- ... -- last step
           |-- prefill -----------|                               |
           |-- latency -------------------------------------------|
                                  |-- steps of decode_per_token --|

    Attributes:
        prefill: until everybody has a first token. Where the prompts take several steps, those who are done early
            decode in it already.
        decode_per_token: a step after that, on average; None if there is none.
    """

    latency: float
    prefill: float
    decode_per_token: float | None


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """What `run_latency` measured, and on what."""

    machine: MachineFacts
    engine: EngineStarted
    options: LatencyOptions
    iterations: list[Iteration]
    peak_rss_bytes: int | None

    @property
    def latency(self) -> Distribution:
        return _distribution([i.latency for i in self.iterations])

    @property
    def prefill(self) -> Distribution:
        return _distribution([i.prefill for i in self.iterations])

    @property
    def decode_per_token(self) -> Distribution | None:
        return Distribution.of([i.decode_per_token for i in self.iterations if i.decode_per_token is not None])

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, in seconds."""
        decode = self.decode_per_token
        return {
            "benchmark": "latency",
            "machine": self.machine.to_dict(),
            "engine": asdict(self.engine),
            "workload": asdict(self.options),
            "results": {
                "latency": self.latency.to_dict(),
                "prefill": self.prefill.to_dict(),
                "decode_per_token": decode and decode.to_dict(),
            },
            "peak_rss_bytes": self.peak_rss_bytes,
            "iterations": [asdict(iteration) for iteration in self.iterations],
        }


def run_latency(config: EngineConfig, options: LatencyOptions) -> LatencyResult:
    """Build the engine, warm it up, and run the batch `options.num_iters` times.

    Raises:
        ConfigError: an option that cannot be honoured, or a batch that does not fit the engine as one.
        ModelLoadError: the model cannot be had.
    """
    log = EventList()
    engine = build_engine(replace(config, skip_tokenizer_init=True), events=log)
    try:
        iterations = _iterations(engine, log, options)
    finally:
        engine.close()
    return LatencyResult(machine_facts(), engine.started, options, iterations, peak_rss_bytes())


def _iterations(engine: Engine, log: EventList, options: LatencyOptions) -> list[Iteration]:
    total = options.num_iters_warmup + options.num_iters
    iterations: list[Iteration] = []
    vocab_size = engine.model_config.vocab_size
    forced_requests(engine, options.workload(vocab_size, 0))
    with progress_bar("iterations", total) as advance:
        for token_round in range(total):
            del log.events[1:]
            drive(engine, options.workload(vocab_size, token_round))
            _check_one_batch(log.events, options)
            iterations.append(measure_iteration(log.events))
            advance()
    return iterations[options.num_iters_warmup :]


def measure_iteration(events: Sequence[Event]) -> Iteration:
    """The times of the one batch whose events these are."""
    steps = [event for event in events if isinstance(event, Step)]
    start = min(event.time for event in events if isinstance(event, RequestArrived))
    first_token: dict[str, float] = {}
    for step in steps:
        for request_id, num_new in zip(step.request_ids, step.num_new, strict=True):
            if num_new:
                first_token.setdefault(request_id, step.time)
    prefilled, end = max(first_token.values()), steps[-1].time
    num_decodes = sum(step.time > prefilled for step in steps)
    return Iteration(
        latency=end - start,
        prefill=prefilled - start,
        decode_per_token=(end - prefilled) / num_decodes if num_decodes else None,
    )


def _check_one_batch(events: Sequence[Event], options: LatencyOptions) -> None:
    for event in events:
        if isinstance(event, RequestWaiting) and event.reason in TOO_SMALL:
            raise ConfigError(
                f"batch_size={options.batch_size} requests of {options.input_len} + {options.output_len} tokens do "
                f"not fit {TOO_SMALL[event.reason]} at once: {event.num_running} run, and the next one needs "
                f"{event.needed_blocks} blocks of {event.free_blocks} free ones. Make the batch smaller, or enlarge "
                "what it does not fit into."
            )
    if any(isinstance(event, Step) and event.preempted for event in events):
        raise ConfigError(
            f"batch_size={options.batch_size} requests of {options.input_len} + {options.output_len} tokens outgrow "
            "the KV pool: make the batch smaller, or the pool larger."
        )


def _distribution(values: Sequence[float]) -> Distribution:
    distribution = Distribution.of(values)
    assert distribution is not None, "there is at least one iteration"
    return distribution
