"""Metrics of single requests, computed from events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from chairlift.events import EngineStarted, Event, RequestArrived, RequestFinished, Step

ANSWERED = frozenset({"stop", "length"})
"""Finish reasons of requests with a complete answer."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The metrics of one request; each of n siblings is a request. Times are in seconds.

    The time of a token is when the result of its step was known. In a static batch it is the end of the request, and
    there are no ITLs and no TPOT (`is_streamed` is False). `num_cached_tokens` is the number of prompt tokens that had
    K and V when the request was first admitted.

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
    is_streamed: bool = True

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def is_answered(self) -> bool:
        return self.finish_reason in ANSWERED

    @property
    def queue_time(self) -> float | None:
        """The time from arrival to the schedule of the first step."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the times between consecutive tokens; 0 between tokens of one step."""
        if not self.is_streamed:
            return []
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with fewer than two output tokens."""
        if len(self.token_times) < 2 or not self.is_streamed:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def e2e_latency(self) -> float | None:
        """The time from arrival to the last token; None without a complete answer."""
        return self.token_times[-1] - self.arrival if self.is_answered and self.token_times else None

    @property
    def normalized_latency(self) -> float | None:
        """E2E latency per output token (Kwon et al., SOSP'23, section 6.1); None without a complete answer."""
        latency = self.e2e_latency
        return None if latency is None else latency / len(self.token_times)


@dataclass(slots=True)
class _Track:
    """A request as its events come in. `index` counts arrivals."""

    index: int
    arrived: RequestArrived
    is_streamed: bool
    finished: RequestFinished | None = None
    first_scheduled: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    token_times: list[float] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the request has ended and the steps of all its tokens are known."""
        return self.finished is not None and len(self.token_times) >= self.num_returned

    def finish(self, event: RequestFinished) -> None:
        self.finished = event
        if not self.is_streamed:
            self.token_times = [event.time] * self.num_returned

    @property
    def num_returned(self) -> int:
        """The number of returned tokens; 0 for an aborted member of a static batch."""
        assert self.finished is not None
        is_returned = self.is_streamed or self.finished.first_token_time is not None
        return self.finished.num_output_tokens if is_returned else 0

    def result(self) -> RequestMetrics:
        """The metrics so far. Tokens are limited to the returned ones, because a step that was in flight when the
        request ended may have sampled more."""
        count = len(self.token_times) if self.finished is None else self.num_returned
        return RequestMetrics(
            request_id=self.arrived.request_id,
            num_prompt_tokens=self.arrived.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            finish_reason=None if self.finished is None else self.finished.finish_reason,
            arrival=self.arrived.time,
            first_scheduled=self.first_scheduled,
            token_times=self.token_times[:count],
            is_streamed=self.is_streamed,
        )


class RequestTally:
    """An event sink that computes the metrics of requests and keeps only those that are not complete.

    Args:
        on_complete: called with the index by arrival and the metrics of each complete request.
    """

    def __init__(self, on_complete: Callable[[int, RequestMetrics], None]) -> None:
        self._on_complete = on_complete
        self._tracks: dict[str, _Track] = {}
        self._replaced: list[_Track] = []
        self._num_arrived = 0
        self._is_streamed = True

    def emit(self, event: Event) -> None:
        if isinstance(event, Step):
            self._add_step(event)
        elif isinstance(event, RequestArrived):
            self._add_request(event)
        elif isinstance(event, RequestFinished):
            if (track := self._tracks.get(event.request_id)) is not None:
                track.finish(event)
                self._remove_if_complete(track)
        elif isinstance(event, EngineStarted):
            self._is_streamed = event.batching != "static"

    def incomplete(self) -> list[tuple[int, RequestMetrics]]:
        """The index and the metrics so far of each request that is not complete."""
        tracks = [*self._replaced, *self._tracks.values()]
        return [(track.index, track.result()) for track in tracks]

    def _add_request(self, event: RequestArrived) -> None:
        """Add a request, which may reuse the id of a finished one."""
        if (track := self._tracks.get(event.request_id)) is not None:
            self._replaced.append(track)
        self._tracks[event.request_id] = _Track(self._num_arrived, event, self._is_streamed)
        self._num_arrived += 1

    def _add_step(self, step: Step) -> None:
        """Add the tokens of a step. Requests whose arrival is unknown are skipped, and so are requests that were not
        admitted, since the step then belongs to an earlier request with the same id."""
        tracks, time = self._tracks, step.time
        if step.admitted:
            self._admit(step)
        for request_id in step.preempted:
            if (track := tracks.get(request_id)) is not None:
                track.num_preemptions += 1
        if self._is_streamed:
            for request_id, num_new in zip(step.request_ids, step.num_new, strict=True):
                if num_new and (track := tracks.get(request_id)) is not None and track.first_scheduled is not None:
                    track.token_times += (time,) * num_new
        for request_id in step.finished:
            if (track := tracks.get(request_id)) is not None:
                self._remove_if_complete(track)

    def _admit(self, step: Step) -> None:
        num_computed = dict(zip(step.request_ids, step.num_computed, strict=True))
        for request_id in step.admitted:
            track = self._tracks.get(request_id)
            if track is not None and track.first_scheduled is None and request_id in num_computed:
                track.first_scheduled = step.scheduled_time
                track.num_cached_tokens = num_computed[request_id]

    def _remove_if_complete(self, track: _Track) -> None:
        if track.is_complete:
            del self._tracks[track.arrived.request_id]
            self._on_complete(track.index, track.result())


def request_metrics(events: Iterable[Event]) -> list[RequestMetrics]:
    """The metrics of all requests in the order of arrival. A request id may be reused after its request has ended."""
    found: list[tuple[int, RequestMetrics]] = []
    tally = RequestTally(lambda index, metrics: found.append((index, metrics)))
    for event in events:
        tally.emit(event)
    found += tally.incomplete()
    return [metrics for _, metrics in sorted(found, key=lambda entry: entry[0])]
