"""Why a request waited: its spans with the arithmetic, what would have let it in, and what the crowd cost it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from chairlift.observability.admission_forecast import Member, Next, steps_until_admitted
from chairlift.observability.queue_timeline import Holder, Stretch
from chairlift.observability.tracked_request import Span, TrackedRequest
from chairlift.observability.tracker import RequestTracker
from chairlift.observability.what_if import Ask, Refusal, WhatIf, what_ifs

MAX_HOLDERS_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who asks: sees the requests of its own tenant by name, others by an opaque id and a size."""

    tenant: str = ""
    is_admin: bool = True
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)

    def may_see(self, tenant: str) -> bool:
        return self.is_admin or tenant == self.tenant

    def name(self, request_id: str, tenant: str) -> str:
        """The request's id, or a name that says nothing but stays the same."""
        if self.may_see(tenant):
            return request_id
        return "other-" + hashlib.blake2s(request_id.encode(), key=self.secret, digest_size=4).hexdigest()


@dataclass(frozen=True, slots=True)
class BatchMember:
    """Somebody in the batch, and the blocks that it held."""

    id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ExplainedSpan:
    """A part of a wait with one reason; `start` and `end` are seconds after the wait began.

    Attributes:
        reason: of `WaitReason`, or "next_step", "restart", "unknown": see `Span`.
        num_steps: steps that were planned without it.
        head: who stood at the head of the queue at first, itself perhaps; None outside of the queue.
        needed_blocks, largest_free_piece: of that one's refusal; free_blocks, evictable_blocks: of the pool.
        num_running, num_waiting: then.
        largest_holders: who held the most memory then.
        estimate: seconds that were to be expected then, had those in the batch run to their limits; None if it was not
            at the head, or if there were too few steps yet to say.
    """

    reason: str
    start: float
    end: float
    num_steps: int
    head: str | None = None
    is_head: bool = False
    needed_blocks: int | None = None
    free_blocks: int | None = None
    evictable_blocks: int | None = None
    largest_free_piece: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    largest_holders: tuple[BatchMember, ...] = ()
    estimate: float | None = None


@dataclass(frozen=True, slots=True)
class ExplainedWait:
    """`cause`: "arrival" or "preemption"; the spans follow one another from 0 to `seconds` without gaps."""

    cause: str
    seconds: float
    spans: tuple[ExplainedSpan, ...]


@dataclass(frozen=True, slots=True)
class ContentionCost:
    """What others cost it, in seconds where nothing else is said.

    Attributes:
        queue_time: its first wait, up to now if that goes on; preempted_time: waits after preemptions.
        recomputed_tokens, recompute_time: computed again after preemptions.
        padding_tokens: of its row of a static batch.
        shared_steps_time: by how much the steps that it was in were longer for the tokens of others.
    """

    queue_time: float
    preempted_time: float
    num_preemptions: int
    recomputed_tokens: int
    recompute_time: float | None
    padding_tokens: int
    shared_steps_time: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Of one request.

    Attributes:
        queue_time: None while it waits for the first time.
        position: how many are to be admitted before it, and expected_wait: seconds until it is, if everybody runs to
            the limit; None unless it waits, or if that cannot be said.
        would_admit: when it was first left waiting.
    """

    id: str
    state: str
    queue_time: float | None
    waits: tuple[ExplainedWait, ...]
    would_admit: tuple[WhatIf, ...]
    contention: ContentionCost
    position: int | None = None
    expected_wait: float | None = None
    rejection: str | None = None


class Explainer:
    """Answers from what a tracker knows. Reading does not disturb it."""

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker

    def explain(
        self, request: TrackedRequest, viewer: Viewer, now: float, ways: Sequence[WhatIf] | None = None
    ) -> Explanation:
        """Explain one sequence.

        Args:
            now: seconds of the engine's clock.
            ways: what would have let it in, if that was found already: `what_ifs` of `refusal`, which may take long
                enough to be worth a thread.
        """
        if ways is None:
            refusal = self.refusal(request)
            ways = [] if refusal is None else what_ifs(refusal)
        waits = self._tracker.spans(request, now)
        explained = tuple(self._wait(request, viewer, index, spans) for index, spans in enumerate(waits))
        position, expected = self._outlook(request)
        return Explanation(
            id=request.request_id,
            state=request.state,
            queue_time=request.queue_time,
            waits=explained,
            would_admit=tuple(ways),
            contention=self._cost(request, explained),
            position=position,
            expected_wait=expected,
            rejection=request.rejection_message,
        )

    # -- waits ---------------------------------------------------------------------------------------------------

    def _wait(self, request: TrackedRequest, viewer: Viewer, index: int, spans: Sequence[Span]) -> ExplainedWait:
        origin = request.waits[index].start
        explained = tuple(self._span(request, viewer, span, origin) for span in spans)
        seconds = explained[-1].end if explained else 0.0
        return ExplainedWait("preemption" if index else "arrival", seconds, explained)

    def _span(self, request: TrackedRequest, viewer: Viewer, span: Span, origin: float) -> ExplainedSpan:
        stretch = next(iter(span.telling(request.request_id)), None)
        if stretch is None:
            return ExplainedSpan(span.reason, span.start - origin, span.end - origin, span.num_steps)
        is_head = stretch.head_id == request.request_id
        needed, free, evictable, largest = _arithmetic(stretch)
        head = None if stretch.head_id is None else viewer.name(stretch.head_id, stretch.head_tenant)
        return ExplainedSpan(
            reason=span.reason,
            start=span.start - origin,
            end=span.end - origin,
            num_steps=span.num_steps,
            head=head,
            is_head=is_head,
            needed_blocks=needed,
            free_blocks=free,
            evictable_blocks=evictable,
            largest_free_piece=largest,
            num_running=stretch.num_running,
            num_waiting=stretch.num_waiting,
            largest_holders=tuple(
                BatchMember(viewer.name(holder.request_id, holder.tenant), holder.num_blocks)
                for holder in stretch.holders[:MAX_HOLDERS_SHOWN]
            ),
            estimate=self._estimate(stretch) if is_head else None,
        )

    def _estimate(self, stretch: Stretch) -> float | None:
        needed, free, _, _ = _arithmetic(stretch)
        steps = steps_until_admitted(
            self._members(stretch.holders),
            [Next(needed or 0, 1)],
            stretch.free_blocks if free is None else free,
            self._free_seats(stretch.num_running),
        )
        return self._seconds(steps, stretch.num_running)

    # -- what is to come -----------------------------------------------------------------------------------------

    def _outlook(self, request: TrackedRequest) -> tuple[int | None, float | None]:
        last = self._tracker.last_step
        if request.state != "waiting" or last is None or request.waits[-1].queued_step is None:
            return None, None
        ahead = [other for other in self._tracker.waiting() if other is not request and self._precedes(other, request)]
        queue = [Next(self._needed(entry), 1 + entry.limit - entry.num_output_tokens) for entry in (*ahead, request)]
        members = self._members(self._tracker.holders())
        steps = steps_until_admitted(members, queue, last.free_blocks, self._free_seats(last.num_running))
        return len(ahead), self._seconds(steps, last.num_running)

    def _precedes(self, one: TrackedRequest, other: TrackedRequest) -> bool:
        """In the order of the queue; under the fair policy, among those of one tenant."""
        started = self._tracker.started
        if started is None or started.scheduling_policy == "fcfs":
            return one.index < other.index
        if started.scheduling_policy == "fair" and one.tenant != other.tenant:
            return self._tracker.last_step is not None and one.request_id == self._tracker.last_step.head_id
        return (one.arrived.priority, one.index) < (other.arrived.priority, other.index)

    def _needed(self, request: TrackedRequest) -> int:
        """Blocks: as it was told, or for all of its known tokens, nothing shared."""
        if request.refusal is not None:
            return request.refusal.needed_blocks
        block_size = 1 if self._tracker.started is None else self._tracker.started.block_size
        return -(-(request.arrived.num_prompt_tokens + request.num_output_tokens) // block_size)

    def _members(self, holders: Sequence[Holder]) -> list[Member]:
        started = self._tracker.started
        budget = 1 if started is None else started.max_num_batched_tokens
        members = [
            Member(h.num_left + -(-max(0, h.num_prompt_tokens - h.num_computed) // budget), h.num_blocks)
            for h in holders
        ]
        if started is None or started.batching != "static" or not members:
            return members
        longest = max(member.steps_left for member in members)
        return [Member(longest, member.num_blocks) for member in members]

    def _free_seats(self, num_running: int) -> int:
        started = self._tracker.started
        if started is None:
            return 0
        if started.static_batch_size is None:
            return started.max_num_seqs - num_running
        return 0 if num_running else started.static_batch_size

    def _seconds(self, steps: int | None, num_running: int) -> float | None:
        seconds = self._tracker.cost.seconds(num_running)
        return None if steps is None or seconds is None else max(1, steps) * seconds

    # -- what would have let it in -------------------------------------------------------------------------------

    def refusal(self, request: TrackedRequest) -> Refusal | None:
        """The moment at which it was first left waiting in the queue; None if it never was."""
        started, waits = self._tracker.started, self._tracker.spans(request)
        span = next((span for span in waits[0] if span.stretches), None) if waits else None
        if started is None or span is None:
            return None
        (stretch,) = span.telling(request.request_id)
        is_head = stretch.head_id == request.request_id
        needed, free, _, largest = _arithmetic(stretch)
        return Refusal(
            started=started,
            reason=stretch.reason or "unknown",
            request=_ask(request, needed if is_head else None),
            holders=stretch.holders,
            ahead=() if is_head else tuple(_ask(other, None) for other in self._queue_before(request, stretch)),
            num_running=stretch.num_running,
            free_blocks=stretch.free_blocks if free is None else free,
            largest_free_piece=stretch.free_blocks if largest is None else largest,
        )

    def _queue_before(self, request: TrackedRequest, stretch: Stretch) -> list[TrackedRequest]:
        step = max(stretch.first_step, request.waits[0].queued_step or 0)
        return [
            other
            for other in self._tracker.requests()
            if other is not request and _is_queued(other, step) and self._precedes(other, request)
        ]

    # -- what it cost --------------------------------------------------------------------------------------------

    def _cost(self, request: TrackedRequest, waits: Sequence[ExplainedWait]) -> ContentionCost:
        line = self._tracker.cost.line()
        alone = None if line is None else line[0] * request.num_steps + line[1] * request.step_tokens
        return ContentionCost(
            queue_time=waits[0].seconds if waits else 0.0,
            preempted_time=sum(wait.seconds for wait in waits[1:]),
            num_preemptions=request.num_preemptions,
            recomputed_tokens=request.recompute_tokens,
            recompute_time=None if line is None else line[1] * request.recompute_tokens,
            padding_tokens=request.padding_tokens,
            shared_steps_time=None if alone is None else max(0.0, request.step_seconds - alone),
        )


def _is_queued(request: TrackedRequest, step: int) -> bool:
    return any(
        wait.queued_step is not None and wait.queued_step <= step and (wait.end_step is None or step < wait.end_step)
        for wait in request.waits
    )


def _ask(request: TrackedRequest, needed: int | None) -> Ask:
    arrived = request.arrived
    return Ask(arrived.num_prompt_tokens, arrived.num_prompt_tokens, arrived.max_tokens, arrived.output_len, needed)


def _arithmetic(stretch: Stretch) -> tuple[int | None, int | None, int | None, int | None]:
    """Needed, free, evictable, largest piece: as the head was told when it was refused."""
    told = stretch.refusal
    if told is None:
        return None, stretch.free_blocks, stretch.evictable_blocks, None
    return told.needed_blocks, told.free_blocks, told.evictable_blocks, told.largest_free_piece
