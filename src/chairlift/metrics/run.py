"""Metrics of a run: throughput, latency percentiles, batch sizes, KV memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from chairlift.events import EngineStarted, Event, RequestRefused, Step
from chairlift.metrics.percentile import Summary
from chairlift.metrics.requests import RequestMetrics, request_metrics


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """A run from its first arrival to its last step. Times in seconds; each of n siblings counts as a request.

    Attributes:
        num_answered: requests that ended by a stop or by length; num_unfinished: that had not ended.
        prompt_tokens: of requests that got a first token; cached_tokens: how many of all prompt tokens were found in
            the prefix cache.
        total_tokens_per_s: prompt and output tokens; requests_per_s: answered ones.
        ttft, queue_time, tpot, itl: over all requests that have one; e2e_latency: over the answered ones.
        mean_batch_size: requests a step; mean_batch_tokens: tokens computed a step.
        kv_use_mean, kv_use_peak: share of the pool's blocks that requests hold, sampled after each schedule; None
            without an EngineStarted event.
        preemptions: how often a request was thrown out to be recomputed.
    """

    duration: float
    num_requests: int
    num_answered: int
    num_unfinished: int
    num_refused: int
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
    queue_time: Summary | None
    mean_batch_size: float
    peak_batch_size: int
    mean_batch_tokens: float
    kv_use_mean: float | None
    kv_use_peak: float | None
    preemptions: int

    def to_dict(self) -> dict[str, Any]:
        """Numbers, None and nested dicts: ready for JSON."""
        return asdict(self)


def summarize(events: Iterable[Event]) -> RunMetrics:
    """The metrics of a run out of its events, in the order in which they were emitted.

    Rates of a run that took no time are 0, and so are the means of a run without steps.
    """
    events = list(events)
    requests = request_metrics(events)
    steps = [event for event in events if isinstance(event, Step)]
    kv_use = _kv_use(events)
    duration = _duration(requests, steps)
    prompt_tokens = sum(r.num_prompt_tokens for r in requests if r.token_times)
    output_tokens = sum(r.num_output_tokens for r in requests)
    num_answered = sum(r.is_answered for r in requests)
    per_second = 1 / duration if duration > 0 else 0.0
    batch_sizes = [len(step.request_ids) for step in steps]
    return RunMetrics(
        duration=duration,
        num_requests=len(requests),
        num_answered=num_answered,
        num_unfinished=sum(r.finish_reason is None for r in requests),
        num_refused=sum(isinstance(event, RequestRefused) for event in events),
        num_steps=len(steps),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(r.num_cached_tokens for r in requests),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens * per_second,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_second,
        requests_per_s=num_answered * per_second,
        ttft=_summary(requests, lambda r: r.ttft),
        tpot=_summary(requests, lambda r: r.tpot),
        itl=Summary.of([gap for r in requests for gap in r.itls]),
        e2e_latency=_summary(requests, lambda r: r.e2e_latency),
        queue_time=_summary(requests, lambda r: r.queue_time),
        mean_batch_size=fmean(batch_sizes or [0]),
        peak_batch_size=max(batch_sizes, default=0),
        mean_batch_tokens=fmean([sum(step.num_scheduled) for step in steps] or [0]),
        kv_use_mean=fmean(kv_use) if kv_use else None,
        kv_use_peak=max(kv_use, default=None),
        preemptions=sum(len(step.preempted) for step in steps),
    )


def _duration(requests: Sequence[RequestMetrics], steps: Sequence[Step]) -> float:
    if not steps:
        return 0.0
    start = min([steps[0].scheduled_time, *(r.arrival for r in requests)])
    return steps[-1].time - start


def _kv_use(events: Iterable[Event]) -> list[float]:
    """Share of the pool that is held, step by step; free blocks include the evictable ones."""
    num_blocks = 0
    shares: list[float] = []
    for event in events:
        if isinstance(event, EngineStarted):
            num_blocks = event.num_blocks
        elif isinstance(event, Step) and num_blocks:
            shares.append(1 - event.free_blocks / num_blocks)
    return shares


def _summary(requests: Sequence[RequestMetrics], value: Callable[[RequestMetrics], float | None]) -> Summary | None:
    return Summary.of([seconds for r in requests if (seconds := value(r)) is not None])
