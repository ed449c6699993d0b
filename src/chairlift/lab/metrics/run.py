"""Metrics of a run: throughput, latency percentiles, batch sizes and KV memory, and which of them are printed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from chairlift.events import EngineStarted, Event, RequestArrived, RequestRejected, Step
from chairlift.lab.metrics.requests import RequestMetrics, RequestTally
from chairlift.lab.metrics.summary import Summary


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """The mean share of the pool of each kind of slot (see `core.measuring.accounting`), by the duration of steps.

    As in the events, `max_tokens` separates `reserved` from `internal` slots. The sum of the shares is 1.
    """

    token_states: float
    reserved: float
    internal: float
    external: float
    free: float


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The metrics of a run from its first arrival to its last step. Times are in seconds; each of n siblings is a
    request.

    Attributes:
        num_answered: number of requests with a complete answer; num_unfinished: number of requests that have not ended.
        prompt_tokens: prompt tokens of requests with an output token.
        cached_tokens: prompt tokens that were found in the prefix cache.
        total_tokens_per_s: prompt and output tokens per second; requests_per_s: answered requests per second.
        ttft, queue_time, tpot, itl: over all requests that have a value.
        e2e_latency, normalized_latency: over the answered requests; the latter is divided by the output tokens.
        mean_batch_size, mean_batch_tokens: mean number of requests, and of computed tokens without padding, per step.
        kv_use_mean, kv_use_peak: share of the blocks that requests hold after each schedule; None without an
            EngineStarted event.
        preemptions: number of preemptions of requests.
        padding_tokens: padding tokens computed for static batches.
        recomputed_tokens: tokens that were computed again after a preemption.
        draft_tokens, accepted_draft_tokens: draft tokens of speculative decoding that were verified and accepted.
        memory: None if the events have no kinds of slots.
    """

    duration: float
    num_requests: int
    num_answered: int
    num_unfinished: int
    num_rejected: int
    num_steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft: Summary | None
    tpot: Summary | None
    itl: Summary | None
    e2e_latency: Summary | None
    normalized_latency: Summary | None
    queue_time: Summary | None
    mean_batch_size: float
    peak_batch_size: int
    mean_batch_tokens: float
    kv_use_mean: float | None
    kv_use_peak: float | None
    preemptions: int
    padding_tokens: int
    recomputed_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    memory: MemoryShares | None

    def to_dict(self) -> dict[str, Any]:
        """The metrics as nested dictionaries for JSON."""
        return asdict(self)


def summarize(events: Iterable[Event]) -> RunMetrics:
    """The metrics of a run from its events, in the order in which they were emitted.

    Rates of a run without duration and means of a run without steps are 0.
    """
    tally = RunTally()
    for event in events:
        tally.emit(event)
    return tally.result()


class RunTally:
    """An event sink that computes the metrics of a run. Its memory grows with the requests and with the number of
    different ITLs, which the requests of a step share; not with all tokens."""

    def __init__(self) -> None:
        self._steps = _StepTotals()
        self._requests = _RequestTotals()
        self._open = RequestTally(lambda _, metrics: self._requests.add(metrics))
        self._first_time = math.inf
        self._num_rejected = 0

    def emit(self, event: Event) -> None:
        if isinstance(event, Step):
            self._first_time = min(self._first_time, event.scheduled_time)
            self._steps.add(event)
        elif isinstance(event, RequestArrived):
            self._first_time = min(self._first_time, event.time)
        elif isinstance(event, RequestRejected):
            self._num_rejected += 1
        elif isinstance(event, EngineStarted):
            self._steps.num_blocks = event.num_blocks
        self._open.emit(event)

    def result(self) -> RunMetrics:
        """The metrics of the events so far."""
        requests = deepcopy(self._requests)
        for _, metrics in self._open.incomplete():
            requests.add(metrics)
        steps = self._steps
        duration = 0.0 if steps.last_time is None else steps.last_time - self._first_time
        summaries = {name: Summary.from_values(values) for name, values in requests.values.items()}
        per_second = 1 / duration if duration > 0 else 0.0
        return RunMetrics(
            duration=duration,
            num_requests=requests.num_requests,
            num_answered=requests.num_answered,
            num_unfinished=requests.num_unfinished,
            num_rejected=self._num_rejected,
            num_steps=steps.num_steps,
            prompt_tokens=requests.prompt_tokens,
            cached_tokens=requests.cached_tokens,
            output_tokens=requests.output_tokens,
            output_tokens_per_s=requests.output_tokens * per_second,
            total_tokens_per_s=(requests.prompt_tokens + requests.output_tokens) * per_second,
            requests_per_s=requests.num_answered * per_second,
            ttft=summaries["ttft"],
            tpot=summaries["tpot"],
            itl=Summary.from_counts(requests.itls),
            e2e_latency=summaries["e2e_latency"],
            normalized_latency=summaries["normalized_latency"],
            queue_time=summaries["queue_time"],
            mean_batch_size=steps.per_step(steps.num_rows),
            peak_batch_size=steps.peak_batch_size,
            mean_batch_tokens=steps.per_step(steps.num_tokens),
            kv_use_mean=steps.per_step(steps.kv_use_sum) if steps.has_kv_use else None,
            kv_use_peak=steps.kv_use_peak if steps.has_kv_use else None,
            preemptions=steps.num_preemptions,
            padding_tokens=steps.num_padding,
            recomputed_tokens=steps.num_recomputed,
            draft_tokens=steps.num_draft,
            accepted_draft_tokens=steps.num_accepted,
            memory=steps.memory(),
        )


SUMMARIZED: Final = ("ttft", "tpot", "e2e_latency", "normalized_latency", "queue_time")
"""The properties of RequestMetrics whose values are summarized."""


@dataclass(slots=True)
class _RequestTotals:
    """Sums and values over requests. ITLs are counted by value, because the requests of a step share them."""

    num_requests: int = 0
    num_answered: int = 0
    num_unfinished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SUMMARIZED})
    itls: Counter[float] = field(default_factory=Counter)

    def add(self, request: RequestMetrics) -> None:
        self.num_requests += 1
        self.num_answered += request.is_answered
        self.num_unfinished += request.finish_reason is None
        self.prompt_tokens += request.num_prompt_tokens if request.token_times else 0
        self.cached_tokens += request.num_cached_tokens
        self.output_tokens += request.num_output_tokens
        self.itls.update(request.itls)
        for name, values in self.values.items():
            if (value := getattr(request, name)) is not None:
                values.append(value)


@dataclass(slots=True)
class _StepTotals:
    """Sums over steps. `kinds` are slot-seconds by kind, in the order of MemoryShares."""

    num_blocks: int = 0
    num_steps: int = 0
    last_time: float | None = None
    num_rows: int = 0
    peak_batch_size: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    num_padding: int = 0
    num_recomputed: int = 0
    num_draft: int = 0
    num_accepted: int = 0
    has_kv_use: bool = False
    kv_use_sum: float = 0.0
    kv_use_peak: float = 0.0
    kinds: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, step: Step) -> None:
        num_rows = len(step.request_ids)
        self.num_steps += 1
        self.last_time = step.time
        self.num_rows += num_rows
        self.peak_batch_size = max(self.peak_batch_size, num_rows)
        self.num_tokens += sum(step.num_scheduled)
        self.num_preemptions += len(step.preempted)
        self.num_padding += sum(step.num_padding)
        self.num_recomputed += step.num_recomputed
        if step.num_draft:
            self.num_draft += sum(step.num_draft)
            self.num_accepted += step.num_accepted
        if self.num_blocks:
            use = 1 - step.free_blocks / self.num_blocks
            self.has_kv_use = True
            self.kv_use_sum += use
            self.kv_use_peak = max(self.kv_use_peak, use)
        seconds, kinds = step.time - step.scheduled_time, self.kinds
        kinds[0] += seconds * step.token_states
        kinds[1] += seconds * step.reserved
        kinds[2] += seconds * step.internal
        kinds[3] += seconds * step.external
        kinds[4] += seconds * step.free

    def per_step(self, total: float) -> float:
        return total / self.num_steps if self.num_steps else 0.0

    def memory(self) -> MemoryShares | None:
        total = sum(self.kinds)
        return MemoryShares(*(kind / total for kind in self.kinds)) if total else None


@dataclass(frozen=True, slots=True)
class ReportedMetric:
    """A metric of a run: its label, the unit of the value after scaling, and the function that returns the value."""

    key: str
    label: str
    unit: str
    value: Callable[[RunMetrics], float | None]
    scale: float = 1.0


def _p(percent: int, summary: Callable[[RunMetrics], Summary | None]) -> Callable[[RunMetrics], float | None]:
    return lambda run: None if (s := summary(run)) is None else float(getattr(s, f"p{percent}"))


def _normalized_latency(run: RunMetrics) -> float | None:
    return None if run.normalized_latency is None else run.normalized_latency.mean


def _accepted_share(run: RunMetrics) -> float | None:
    return run.accepted_draft_tokens / run.draft_tokens if run.draft_tokens else None


def _share(kind: str) -> Callable[[RunMetrics], float | None]:
    return lambda run: None if run.memory is None else float(getattr(run.memory, kind))


REPORTED_METRICS: Final = (
    ReportedMetric("output_tokens_per_s", "output tokens", "/s", lambda run: run.output_tokens_per_s),
    ReportedMetric("total_tokens_per_s", "prompt and output tokens", "/s", lambda run: run.total_tokens_per_s),
    ReportedMetric("requests_per_s", "requests", "/s", lambda run: run.requests_per_s),
    ReportedMetric("e2e_latency_p50", "E2E latency p50", "s", _p(50, lambda run: run.e2e_latency)),
    ReportedMetric("e2e_latency_p99", "E2E latency p99", "s", _p(99, lambda run: run.e2e_latency)),
    ReportedMetric("normalized_latency_mean", "E2E latency by output token, mean", "s", _normalized_latency),
    ReportedMetric("ttft_p50", "TTFT p50", "s", _p(50, lambda run: run.ttft)),
    ReportedMetric("ttft_p99", "TTFT p99", "s", _p(99, lambda run: run.ttft)),
    ReportedMetric("itl_p50", "ITL p50", "ms", _p(50, lambda run: run.itl), 1e3),
    ReportedMetric("itl_p99", "ITL p99", "ms", _p(99, lambda run: run.itl), 1e3),
    ReportedMetric("mean_batch_size", "batch, mean", "requests", lambda run: run.mean_batch_size),
    ReportedMetric("mean_batch_tokens", "step, mean", "tokens", lambda run: run.mean_batch_tokens),
    ReportedMetric("kv_use_mean", "KV blocks held, mean over steps", "%", lambda run: run.kv_use_mean, 100),
    ReportedMetric("kv_use_peak", "KV blocks held, peak", "%", lambda run: run.kv_use_peak, 100),
    ReportedMetric("token_states", "KV slots with token states", "%", _share("token_states"), 100),
    ReportedMetric("reserved", "KV slots reserved", "%", _share("reserved"), 100),
    ReportedMetric("internal", "KV slots, internal fragmentation", "%", _share("internal"), 100),
    ReportedMetric("external", "KV slots, external fragmentation", "%", _share("external"), 100),
    ReportedMetric("free", "KV slots free", "%", _share("free"), 100),
    ReportedMetric("preemptions", "preemptions", "", lambda run: run.preemptions),
    ReportedMetric(
        "recomputed_tokens", "tokens computed again after preemption", "", lambda run: run.recomputed_tokens
    ),
    ReportedMetric("padding_tokens", "padding tokens computed", "", lambda run: run.padding_tokens),
    ReportedMetric("draft_tokens", "draft tokens verified", "", lambda run: run.draft_tokens or None),
    ReportedMetric("accepted_draft_tokens", "draft tokens accepted", "%", _accepted_share, 100),
    ReportedMetric("cached_tokens", "prompt tokens from the prefix cache", "", lambda run: run.cached_tokens),
)
"""The metrics that benchmarks and simulations print, one line each."""
