"""Metrics of a run: throughput, latency percentiles, batch sizes and KV memory, and which of them are printed."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final

import numpy as np

from chairlift.events import SLOT_KINDS, EngineStarted, Event, RequestArrived, RequestRejected, Step
from chairlift.lab.metrics.requests import RequestMetrics, RequestTally
from chairlift.lab.tables import number


@dataclass(frozen=True, slots=True)
class Summary:
    """Count, mean, percentiles and maximum of a set of numbers, in their unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Summary | None:
        """The summary of a list of values; None if it is empty."""
        if not values:
            return None
        p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
        return cls(len(values), fmean(values), p50, p90, p99, max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """The metrics of a run from its first arrival to its last step. Times are in seconds; each of n siblings is a
    request.

    Attributes:
        num_answered: number of requests with a complete answer; num_unfinished: number of requests that have not ended.
        num_with_slo, num_met_slo: number of ended requests with an SLO, and of those that met it.
        prompt_tokens: prompt tokens of requests with an output token.
        cached_tokens: prompt tokens that were found in the prefix cache.
        total_tokens_per_s: prompt and output tokens per second; requests_per_s: answered requests per second.
        ttft, queue_time, tpot, itl: over all requests that have a value.
        qoe: quality of experience of the streams (`ReadingCurve`), from 0 to 1.
        e2e_latency, normalized_latency: over the answered requests; the latter is divided by the output tokens.
        length_error: the difference of predicted and true output lengths of answered requests, in tokens.
        length_coverage: the share of them whose output is not longer than predicted; None without predictions.
        mean_batch_size, mean_batch_tokens: mean number of requests, and of computed tokens without padding, per step.
        mean_busy_seats: mean number of requests of which a step computes a token; padding is not counted.
        kv_use_mean, kv_use_peak: share of the blocks that requests hold after each schedule; None without an
            EngineStarted event.
        preemptions: number of preemptions of requests.
        padding_tokens: padding tokens computed for static batches.
        recomputed_tokens: tokens that were computed again after a preemption.
        swapped_blocks: blocks that were copied to and from the swap space.
        draft_tokens, accepted_draft_tokens: draft tokens of speculative decoding that were verified and accepted.
        memory: the mean share of the pool of each kind of slot (see `core.measuring.accounting`), by the duration of
            steps; None if the events have no kinds of slots. As in the events, `max_tokens` separates `reserved` from
            `internal` slots.
    """

    duration: float
    num_requests: int = 0
    num_answered: int = 0
    num_unfinished: int = 0
    num_rejected: int
    num_with_slo: int = 0
    num_met_slo: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft: Summary | None
    tpot: Summary | None
    itl: Summary | None
    e2e_latency: Summary | None
    normalized_latency: Summary | None
    queue_time: Summary | None
    qoe: Summary | None
    length_error: Summary | None
    length_coverage: float | None
    mean_batch_size: float = 0.0
    mean_busy_seats: float = 0.0
    peak_batch_size: int
    mean_batch_tokens: float = 0.0
    kv_use_mean: float | None = None
    kv_use_peak: float | None
    preemptions: int = 0
    padding_tokens: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    memory: dict[str, float] | None

    def values(self) -> dict[str, float]:
        """The metrics that are not None by name. Those of summaries are named as `ttft_p50`, and shares of memory by
        their kind of slot. Without draft tokens there are no values of speculative decoding, without SLOs there is no
        goodput, and without swapped blocks their number is missing."""
        values: dict[str, float] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                prefix = "" if name == "memory" else f"{name}_"
                values |= {f"{prefix}{part}": number for part, number in value.items()}
            elif value is not None:
                values[name] = value
        if self.draft_tokens:
            values["draft_acceptance"] = self.accepted_draft_tokens / self.draft_tokens
        else:
            del values["draft_tokens"], values["accepted_draft_tokens"]
        if self.num_with_slo:
            values["goodput"] = self.num_met_slo / self.duration if self.duration > 0 else 0.0
            values["slo_attainment"] = self.num_met_slo / self.num_with_slo
        else:
            del values["num_with_slo"], values["num_met_slo"]
        if not self.swapped_blocks:
            del values["swapped_blocks"]
        return values


def summarize(events: Iterable[Event]) -> RunMetrics:
    """The metrics of a run from its events, in the order in which they were emitted.

    Rates of a run without duration and means of a run without steps are 0.
    """
    tally = RunTally()
    for event in events:
        tally.emit(event)
    return tally.result()


class RunTally:
    """An event sink that computes the metrics of a run. Its memory grows with the requests, and by 8 bytes a token."""

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
        steps, counts = self._steps, requests.counts
        duration = 0.0 if steps.last_time is None else steps.last_time - self._first_time
        per_second = 1 / duration if duration > 0 else 0.0
        values: dict[str, Any] = {**counts, **steps.counts}
        values |= {name: total / steps.counts["num_steps"] for name, total in steps.sums.items()}
        values |= {name: Summary.from_values(found) for name, found in requests.values.items()}
        return RunMetrics(
            **values,
            duration=duration,
            num_rejected=self._num_rejected,
            output_tokens_per_s=counts["output_tokens"] * per_second,
            total_tokens_per_s=(counts["prompt_tokens"] + counts["output_tokens"]) * per_second,
            requests_per_s=counts["num_answered"] * per_second,
            itl=Summary.from_values(requests.itls),
            peak_batch_size=steps.peak_batch_size,
            kv_use_peak=steps.kv_use_peak,
            memory=steps.memory(),
            length_coverage=requests.length_coverage,
        )


SUMMARIZED: Final = ("ttft", "tpot", "e2e_latency", "normalized_latency", "queue_time", "length_error", "qoe")
"""The properties of RequestMetrics whose values are summarized."""


class _RequestTotals:
    """Sums and values over requests: `counts` are fields of RunMetrics."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.values: dict[str, list[float]] = {name: [] for name in SUMMARIZED}
        self.itls = array("d")
        self.num_covered = 0

    def add(self, request: RequestMetrics) -> None:
        counts = self.counts
        counts["num_requests"] += 1
        counts["num_answered"] += request.is_answered
        counts["num_unfinished"] += request.finish_reason is None
        counts["num_with_slo"] += request.met_slo is not None
        counts["num_met_slo"] += request.met_slo is True
        counts["prompt_tokens"] += request.num_prompt_tokens if request.token_times else 0
        counts["cached_tokens"] += request.num_cached_tokens
        counts["output_tokens"] += request.num_output_tokens
        self.itls.extend(request.itls)
        for name, values in self.values.items():
            if (value := getattr(request, name)) is not None:
                values.append(value)
        if request.length_error is not None:
            self.num_covered += request.num_output_tokens <= (request.predicted_len or 0)

    @property
    def length_coverage(self) -> float | None:
        num_predicted = len(self.values["length_error"])
        return self.num_covered / num_predicted if num_predicted else None


class _StepTotals:
    """Sums over steps: `counts` are fields of RunMetrics, `sums` those whose means are, and `kinds` slot-seconds."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.sums: dict[str, float] = defaultdict(float)
        self.kinds = dict.fromkeys(SLOT_KINDS, 0.0)
        self.last_time: float | None = None
        self.kv_use_peak: float | None = None
        self.num_blocks = self.peak_batch_size = 0

    def add(self, step: Step) -> None:
        num_rows, counts, sums = len(step.request_ids), self.counts, self.sums
        counts["num_steps"] += 1
        counts["preemptions"] += len(step.preempted)
        counts["padding_tokens"] += sum(step.num_padding)
        counts["recomputed_tokens"] += step.num_recomputed
        counts["swapped_blocks"] += step.blocks_swapped_out + step.blocks_swapped_in
        if step.num_draft:
            counts["draft_tokens"] += sum(step.num_draft)
            counts["accepted_draft_tokens"] += step.num_accepted
        self.last_time = step.time
        sums["mean_batch_size"] += num_rows
        sums["mean_busy_seats"] += sum(map(bool, step.num_scheduled))
        sums["mean_batch_tokens"] += sum(step.num_scheduled)
        self.peak_batch_size = max(self.peak_batch_size, num_rows)
        if self.num_blocks:
            use = 1 - step.free_blocks / self.num_blocks
            sums["kv_use_mean"] += use
            self.kv_use_peak = max(self.kv_use_peak or 0.0, use)
        seconds = step.time - step.scheduled_time
        for kind in SLOT_KINDS:
            self.kinds[kind] += seconds * getattr(step, kind)

    def memory(self) -> dict[str, float] | None:
        total = sum(self.kinds.values())
        return {kind: slots / total for kind, slots in self.kinds.items()} if total else None


@dataclass(frozen=True, slots=True)
class ReportedMetric:
    """A metric of a table: its key among the values of a run, its label, the unit of the scaled value, and the number
    of decimals; None for three or more significant digits."""

    key: str
    label: str
    unit: str
    scale: float = 1.0
    decimals: int | None = None

    @property
    def heading(self) -> str:
        """The label with the unit: "output tokens/s", "TTFT p50, s"."""
        return self.label + (self.unit if not self.unit or self.unit.startswith("/") else f", {self.unit}")

    def cell(self, value: float | None) -> str:
        """The scaled value as text; empty if there is none."""
        if value is None:
            return ""
        scaled = value * self.scale
        return number(scaled) if self.decimals is None else f"{scaled:.{self.decimals}f}"


REPORTED_METRICS: Final = (
    ReportedMetric("output_tokens_per_s", "output tokens", "/s"),
    ReportedMetric("total_tokens_per_s", "prompt and output tokens", "/s"),
    ReportedMetric("requests_per_s", "requests", "/s"),
    ReportedMetric("qoe_mean", "quality of experience (QoE), mean", ""),
    ReportedMetric("e2e_latency_mean", "E2E latency, mean", "s"),
    ReportedMetric("goodput", "requests within their SLO (goodput)", "/s"),
    ReportedMetric("slo_attainment", "requests within their SLO", "%", 100),
    ReportedMetric("e2e_latency_p50", "E2E latency p50", "s"),
    ReportedMetric("e2e_latency_p99", "E2E latency p99", "s"),
    ReportedMetric("normalized_latency_mean", "E2E latency per output token, mean", "s"),
    ReportedMetric("ttft_p50", "TTFT p50", "s"),
    ReportedMetric("ttft_p99", "TTFT p99", "s"),
    ReportedMetric("itl_p50", "ITL p50", "ms", 1e3),
    ReportedMetric("itl_p99", "ITL p99", "ms", 1e3),
    ReportedMetric("length_error_mean", "predicted output length, mean error", "tokens"),
    ReportedMetric("length_coverage", "outputs within the predicted length", "%", 100),
    ReportedMetric("mean_batch_size", "batch, mean", "requests"),
    ReportedMetric("mean_busy_seats", "seats with work, mean", ""),
    ReportedMetric("mean_batch_tokens", "step, mean", "tokens"),
    ReportedMetric("kv_use_mean", "KV blocks held, mean over steps", "%", 100),
    ReportedMetric("kv_use_peak", "KV blocks held, peak", "%", 100),
    ReportedMetric("token_states", "KV slots with token states", "%", 100),
    ReportedMetric("reserved", "KV slots reserved", "%", 100),
    ReportedMetric("internal", "KV slots, internal fragmentation", "%", 100),
    ReportedMetric("external", "KV slots, external fragmentation", "%", 100),
    ReportedMetric("free", "KV slots free", "%", 100),
    ReportedMetric("waste", "KV slots wasted", "%", 100),
    ReportedMetric("preemptions", "preemptions", ""),
    ReportedMetric("recomputed_tokens", "tokens computed again after preemption", ""),
    ReportedMetric("swapped_blocks", "blocks copied to and from the swap space", ""),
    ReportedMetric("padding_tokens", "padding tokens computed", ""),
    ReportedMetric("draft_tokens", "draft tokens verified", ""),
    ReportedMetric("draft_acceptance", "draft tokens accepted", "%", 100),
    ReportedMetric("cached_tokens", "prompt tokens from the prefix cache", ""),
)
"""The metrics that benchmarks and simulations print, one line each."""
