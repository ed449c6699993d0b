"""The state of one request as its events show it: waits, progress and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from chairlift.events import PrefixMatched, RequestArrived, RequestFinished, RequestWaiting
from chairlift.observability.queue_timeline import QueueInterval
from chairlift.request import FinishReason
from chairlift.slo import SLO

RequestState = Literal["waiting", "running", "finished", "rejected", "lost"]


class WaitSpan(NamedTuple):
    """A part of a wait with one reason, which lasts from the schedule of one step to the schedule of another.

    The reason is a `request.WaitReason`, or

    - "next_step": the time until the next step was scheduled,
    - "restart": the time until the engine was restarted,
    - "unknown": the events of these steps were lost.

    Attributes:
        start, end: seconds of the engine's clock; each span begins where the previous one ends.
        num_steps: number of steps that were scheduled without the request.
        interval: the interval of the queue that explains the span: the first one with the request at the head of the
            queue, or the first one if it never was; None if it was not in the queue.
    """

    reason: str
    start: float
    end: float
    num_steps: int
    interval: QueueInterval | None = None

    def joined(self, following: WaitSpan, request_id: str) -> WaitSpan:
        """This span and the following one, which has the same reason, as one."""
        num_steps, interval = self.num_steps + following.num_steps, _decisive((self, following), request_id)
        return self._replace(end=following.end, num_steps=num_steps, interval=interval)


def _decisive(spans: Sequence[WaitSpan], request_id: str) -> QueueInterval | None:
    """The interval that explains several spans of a request."""
    intervals = [span.interval for span in spans if span.interval is not None]
    at_head = (interval for interval in intervals if interval.head_id == request_id)
    return next(at_head, next(iter(intervals), None))


def sum_by_reason(spans: Sequence[WaitSpan], request_id: str) -> list[WaitSpan]:
    """One span for each reason with the time and the steps of all its spans, in the order of the first ones."""
    by_reason: dict[str, list[WaitSpan]] = {}
    for span in spans:
        by_reason.setdefault(span.reason, []).append(span)
    summed: list[WaitSpan] = []
    for reason, parts in by_reason.items():
        start = summed[-1].end if summed else spans[0].start
        is_last = len(summed) == len(by_reason) - 1
        end = spans[-1].end if is_last else min(spans[-1].end, start + sum(part.end - part.start for part in parts))
        num_steps, interval = sum(part.num_steps for part in parts), _decisive(parts, request_id)
        summed.append(WaitSpan(reason, start, end, num_steps, interval))
    return summed


@dataclass(slots=True)
class Wait:
    """The time from the arrival or a preemption of a request until it is admitted or ends.

    Attributes:
        first_step: the first step that could have contained the request.
        end_step: the step that contains it, or the first step that was scheduled after its end.
        displaced_by: the request that took its seat; None after an arrival, or a preemption for lack of memory.
        queued_step: the first step for which it was in the queue; None while it is parked.
        spans: set when the wait has ended and all of its steps are known.
        headed: the intervals of the queue with the request at its head.
        summed: one span for each reason of the steps before `summed_step`, which a long wait does not keep one by one.
    """

    start: float
    first_step: int
    queued_step: int | None
    end: float | None = None
    end_step: int | None = None
    is_restart: bool = False
    displaced_by: str | None = None
    spans: list[WaitSpan] | None = None
    headed: list[QueueInterval] = field(default_factory=list)
    summed: list[WaitSpan] = field(default_factory=list)
    summed_step: int | None = None

    @property
    def first_kept_step(self) -> int:
        """The first step that is not in `summed`."""
        return self.first_step if self.summed_step is None else self.summed_step


@dataclass(slots=True)
class TrackedRequest:
    """A request with its state, progress and waits.

    Attributes:
        waits: in order; the first one is the queue time.
        num_computed: number of tokens with K and V.
        num_cached_tokens: tokens that other requests had computed when it was admitted for the first time;
            num_matched_tokens: those with K and V, of which the recurrent state may be known for fewer; prefix: why not
            more, if there is a prefix cache.
        block_ids: held blocks, including shared ones, in the order of their allocation.
        num_steps, step_seconds, step_tokens: number and seconds of the steps that contained the request, and the number
            of its own tokens in them.
        prefill: number, seconds and own tokens of the steps until its first output token; None before it.
        num_swaps: preemptions after which its K and V were in the swap space.
        recompute_tokens: tokens that were computed again after preemptions.
        draft_tokens, accepted_draft_tokens: draft tokens of speculative decoding that were verified and accepted.
        waiting_event: the last event of the request at the head of the queue.
        last_token: the time of its last output token; token_gap: the seconds between the last two steps with tokens.
        lost_time: the time at which its engine ended before it.
        end_step: the first step that was scheduled after it has ended.
        num_siblings: the number of requests that it leads.
    """

    index: int
    arrived: RequestArrived
    waits: list[Wait]
    state: RequestState = "waiting"
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_matched_tokens: int = 0
    prefix: PrefixMatched | None = None
    num_preemptions: int = 0
    num_swaps: int = 0
    recompute_until: int = 0
    recompute_tokens: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: RequestFinished | None = None
    rejection_message: str | None = None
    num_steps: int = 0
    step_seconds: float = 0.0
    step_tokens: int = 0
    prefill: tuple[int, float, int] | None = None
    padding_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    waiting_event: RequestWaiting | None = None
    last_token: float | None = None
    token_gap: float | None = None
    lost_time: float | None = None
    end_step: int = 0
    num_siblings: int = 0

    @property
    def request_id(self) -> str:
        return self.arrived.request_id

    @property
    def tenant(self) -> str:
        return self.arrived.tenant

    @property
    def num_blocks(self) -> int:
        """Number of held blocks, including shared ones."""
        return len(self.block_ids)

    @property
    def max_output_tokens(self) -> int:
        """The forced output length, or `max_tokens`."""
        return self.arrived.max_tokens if self.arrived.output_len is None else self.arrived.output_len

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the schedule of the first step."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrived.time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return None if self.first_token is None else self.first_token - self.arrived.time

    @property
    def end_time(self) -> float | None:
        """The time at which it finished or was lost."""
        return self.lost_time if self.finished is None else self.finished.time

    @property
    def slo(self) -> SLO | None:
        return None if self.arrived.slo is None else SLO(**self.arrived.slo)

    @property
    def met_slo(self) -> bool | None:
        """Whether it met its SLO; None if it has none, has not finished, or was aborted before its first token."""
        event, slo = self.finished, self.slo
        if event is None or slo is None or self.lost_time is not None:
            return None
        if event.first_token_time is None:
            return None if event.finish_reason == FinishReason.ABORT else False
        failed = event.finish_reason in (FinishReason.ERROR, FinishReason.TIMEOUT)
        return not failed and slo.is_met(event.first_token_time - event.arrival_time, self.tpot)

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first, until the end; None before it, or with fewer than two."""
        event = self.finished
        if event is None or event.first_token_time is None or event.num_output_tokens < 2:
            return None
        return (event.time - event.first_token_time) / (event.num_output_tokens - 1)

    def add_row(
        self, start: int, num_kept: int, num_scheduled: int, num_new: int, padding: int, seconds: float, time: float
    ) -> None:
        """Add a step that took `seconds` until `time`, and computed tokens from position `start`.

        Args:
            num_kept: computed tokens without rejected draft tokens.
            num_scheduled: all computed tokens.
            num_new: sampled tokens. Those that are known after an abort are not output tokens.
        """
        end = start + num_kept
        self.num_computed = end
        self.num_steps += 1
        self.step_seconds += seconds
        self.step_tokens += num_scheduled
        self.padding_tokens += padding
        if start < self.recompute_until:
            self.recompute_tokens += max(0, min(end, self.recompute_until) - start)
        if not num_new:
            return
        if self.finished is None:
            self.num_output_tokens += num_new
        elif time > self.finished.time:
            return
        if self.last_token is None:
            self.first_token = time
            self.prefill = self.num_steps, self.step_seconds, self.step_tokens
        else:
            self.token_gap = time - self.last_token
        self.last_token = time

    def preempt(self, step: int, time: float, displaced_by: str | None = None) -> None:
        """Begin a new wait with the preemption in `step`."""
        self.recompute_until = max(self.recompute_until, self.num_computed)
        self.num_computed = 0
        self.block_ids = []
        self.num_preemptions += 1
        self.waits.append(Wait(time, step, step, displaced_by=displaced_by))
        self.state = "waiting"
        if self.finished is not None:
            self.finish(self.finished)

    def admit(self, step: int, time: float, num_cached: int, num_matched: int = 0) -> None:
        """End the current wait with the admission in `step`."""
        wait = self.waits[-1]
        wait.end, wait.end_step, wait.spans = time, step, None
        if wait.queued_step is None:
            wait.queued_step = step
        if self.first_scheduled is None:
            self.first_scheduled = time
            self.num_cached_tokens = num_cached
            self.num_matched_tokens = max(num_cached, num_matched)
        if self.finished is None:
            self.state = "running"

    def finish(self, event: RequestFinished) -> None:
        """End the request. The event of a step that was scheduled earlier may still follow."""
        self.finished = event
        self.state = "finished"
        self.num_output_tokens = event.num_output_tokens
        self.end_step = event.step
        self._end_wait(event.time, event.step)

    def lose(self, time: float, step: int) -> None:
        """End the request with its engine.

        Args:
            step: the next step that the engine would have scheduled.
        """
        self.lost_time = time
        self.state = "lost"
        self._end_wait(time, step)

    def _end_wait(self, time: float, step: int) -> None:
        wait = self.waits[-1]
        if wait.end is None:
            wait.end, wait.end_step = max(time, wait.start), step
