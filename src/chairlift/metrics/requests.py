"""Latencies of single requests, from events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from chairlift.events import Event, RequestArrived, RequestFinished, Step

ANSWERED = frozenset({"stop", "length"})
"""Finish reasons of requests that got their whole answer."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """One request (each of n siblings is one); all times in seconds.

    A token's time is when the result of its step was known. `num_cached_tokens` are prompt tokens that had K and V when
    the request was first admitted.

        arrival ------- first_scheduled ------- token_times[0] --- ... --- token_times[-1]
           |-- queue_time --|                         |-- itls: the gaps ---------|
           |------------------- ttft -----------------|
           |------------------------------- e2e_latency --------------------------|
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    finish_reason: str | None
    arrival: float
    first_scheduled: float | None
    token_times: list[float]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def is_answered(self) -> bool:
        return self.finish_reason in ANSWERED

    @property
    def queue_time(self) -> float | None:
        """From arrival until first scheduled."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the gaps between consecutive tokens. Tokens of one step are 0 apart."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def e2e_latency(self) -> float | None:
        """From arrival to the last token; None unless it was answered."""
        return self.token_times[-1] - self.arrival if self.is_answered and self.token_times else None


@dataclass(slots=True)
class _Track:
    """A request as its events come in."""

    arrived: RequestArrived
    finished: RequestFinished | None = None
    first_scheduled: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    token_times: list[float] = field(default_factory=list)

    def result(self) -> RequestMetrics:
        """A request's end comes before its last step, and a step that was in flight then may have sampled more than
        the request got: what it says itself counts."""
        count = len(self.token_times) if self.finished is None else self.finished.num_output_tokens
        return RequestMetrics(
            request_id=self.arrived.request_id,
            num_prompt_tokens=self.arrived.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            finish_reason=None if self.finished is None else self.finished.finish_reason,
            arrival=self.arrived.time,
            first_scheduled=self.first_scheduled,
            token_times=self.token_times[:count],
        )


def request_metrics(events: Iterable[Event]) -> list[RequestMetrics]:
    """One entry for every request that arrived, in that order. A request id may come again once it has finished."""
    tracks: list[_Track] = []
    latest: dict[str, _Track] = {}
    for event in events:
        if isinstance(event, RequestArrived):
            latest[event.request_id] = _Track(event)
            tracks.append(latest[event.request_id])
        elif isinstance(event, RequestFinished) and event.request_id in latest:
            latest[event.request_id].finished = event
        elif isinstance(event, Step):
            _take_step(event, latest)
    return [track.result() for track in tracks]


def _take_step(step: Step, latest: dict[str, _Track]) -> None:
    """Requests that arrived before the first event are skipped; so is a step that belongs to an earlier request of the
    same id, because the later one was not admitted yet."""
    for request_id in step.preempted:
        if (track := latest.get(request_id)) is not None:
            track.num_preemptions += 1
    admitted = set(step.admitted)
    columns = zip(step.request_ids, step.num_computed, step.num_new, strict=True)
    for request_id, num_computed, num_new in columns:
        track = latest.get(request_id)
        if track is None:
            continue
        if track.first_scheduled is None and request_id in admitted:
            track.first_scheduled = step.scheduled_time
            track.num_cached_tokens = num_computed
        if track.first_scheduled is not None:
            track.token_times += [step.time] * num_new
