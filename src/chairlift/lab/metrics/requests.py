"""Metrics of single requests, computed from events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from chairlift.events import Event, Step
from chairlift.observability.replay import Replay, ReplayReader, Rows
from chairlift.observability.tracked_request import TrackedRequest
from chairlift.slo import SLO

DEFAULT_TOKENS_PER_SECOND: Final = 5.3
"""238 words per minute, the mean of silent reading (Brysbaert, 2019), at four tokens for three words."""

EXPECTED_TTFT_SECONDS: Final = 1.0
"""The expected time to first token of a request without an objective."""


class ReadingCurve:
    """The tokens of one stream as they are read, and the quality of experience (QoE) of Andes (Liu et al., 2024, arXiv
    2404.16283v2, section 3).

        QoE = 1 - S_delay / S_whole

    A reader reads each token when it has arrived and the token before it is read. S_delay is the sum, over the tokens,
    of the time by which this is later than expected: the first token at the expected time, and the others at the speed
    of the reader. S_whole is the sum of the time from then to the end of reading. QoE is 1 if the reader never waits.

    Args:
        tokens_per_second: the speed of the reader.
        slo: its `ttft_ms` is the expected time to first token.
    """

    __slots__ = ("_expected", "_gap", "_num_tokens", "_read", "_sum_delay", "_sum_expected")

    def __init__(self, tokens_per_second: float, slo: SLO | None = None) -> None:
        ttft_ms = None if slo is None else slo.ttft_ms
        self._gap = 1 / tokens_per_second
        self._expected = self._read = EXPECTED_TTFT_SECONDS if ttft_ms is None else ttft_ms / 1e3
        self._num_tokens = 0
        self._sum_delay = self._sum_expected = 0.0

    def add(self, seconds: float) -> None:
        """Add a token that arrived so many seconds after the request."""
        self._read = max(seconds, self._read)
        self._sum_delay += self._read - self._expected
        self._sum_expected += self._expected
        self._num_tokens += 1
        self._read += self._gap
        self._expected += self._gap

    def qoe(self) -> float | None:
        """The QoE of the tokens so far; None if there are none."""
        if not self._num_tokens:
            return None
        return 1 - self._sum_delay / (self._num_tokens * self._read - self._sum_expected)


ANSWERED = frozenset({"stop", "length"})
"""Finish reasons of requests with a complete answer."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The metrics of one request; each of n siblings is a request. Times are in seconds.

    The time of a token is when the result of its step was known. In a static batch it is the end of the request, and
    there are no ITLs and no TPOT (`is_streamed` is False). `num_cached_tokens` is the number of prompt tokens that had
    K and V when the request was first admitted. `TrackedRequest` defines `met_slo`.

        arrival ------- first_scheduled ------- token_times[0] --- ... --- token_times[-1]
           |-- queue_time --|                         |-- itls: the gaps ---------|
           |------------------- ttft -----------------|
           |------------------------------- e2e_latency --------------------------|
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    finish_reason: str | None
    arrival: float
    first_scheduled: float | None
    token_times: list[float]
    is_streamed: bool = True
    predicted_len: int | None = None
    met_slo: bool | None = None
    qoe: float | None = None

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
    def length_error(self) -> float | None:
        """The difference of predicted and true output length; None without a prediction or a complete answer."""
        if self.predicted_len is None or not self.is_answered:
            return None
        return abs(self.predicted_len - self.num_output_tokens)

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


class RequestTally(ReplayReader):
    """An event sink that computes the metrics of requests and keeps only those that a later step may contain.

    Args:
        on_complete: called with the index by arrival and the metrics of each request that has ended.
    """

    def __init__(self, on_complete: Callable[[int, RequestMetrics], None]) -> None:
        self._on_complete = on_complete
        self._replay = Replay(self)
        self._token_times: dict[int, list[float]] = defaultdict(list)

    def emit(self, event: Event) -> None:
        self._replay.emit(event)

    def incomplete(self) -> list[tuple[int, RequestMetrics]]:
        """The index and the metrics so far of each request that is not complete."""
        return [(request.index, self._metrics(request)) for request in self._replay.remaining]

    def on_step(self, step: Step, rows: Rows) -> None:
        if self._replay.is_static:
            return
        times, time, num_new = self._token_times, step.time, step.num_new
        for request, index in rows:
            if count := num_new[index]:
                times[request.index] += (time,) * count

    def on_leave(self, request: TrackedRequest) -> None:
        metrics = self._metrics(request)
        self._token_times.pop(request.index, None)
        self._on_complete(request.index, metrics)

    def _metrics(self, request: TrackedRequest) -> RequestMetrics:
        is_streamed, finished, started = not self._replay.is_static, request.finished, self._replay.started
        times = self._token_times.get(request.index, [])[:]
        if finished is not None and is_streamed:  # A step that was in flight at the end may have sampled more tokens.
            del times[finished.num_output_tokens :]
        elif finished is not None and finished.first_token_time is not None:
            times = [finished.time] * finished.num_output_tokens
        speed = None if started is None else started.pacing_tokens_per_second
        curve = ReadingCurve(speed or DEFAULT_TOKENS_PER_SECOND, request.slo)
        if is_streamed and request.arrived.is_streamed:
            for time in times:
                curve.add(time - request.arrived.time)
        return RequestMetrics(
            request_id=request.request_id,
            num_prompt_tokens=request.arrived.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            finish_reason=None if finished is None else finished.finish_reason,
            arrival=request.arrived.time,
            first_scheduled=request.first_scheduled,
            token_times=times,
            is_streamed=is_streamed,
            predicted_len=request.arrived.predicted_len,
            met_slo=request.met_slo,
            qoe=curve.qoe(),
        )


def request_metrics(events: Iterable[Event]) -> list[RequestMetrics]:
    """The metrics of all requests in the order of arrival. A request id may be reused after its request has ended."""
    found: list[tuple[int, RequestMetrics]] = []
    tally = RequestTally(lambda index, metrics: found.append((index, metrics)))
    for event in events:
        tally.emit(event)
    found += tally.incomplete()
    return [metrics for _, metrics in sorted(found, key=lambda entry: entry[0])]
