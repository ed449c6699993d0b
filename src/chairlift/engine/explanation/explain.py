"""Explains a request: the reasons of its waits, what would have admitted it, and the cost of other requests."""

from __future__ import annotations

import hashlib
import heapq
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from chairlift.core.kv.kv_groups import KVGroups
from chairlift.engine.explanation.explained_prefix import describe_prefix
from chairlift.engine.explanation.explained_slo import ExplainedSLO, explain_slo
from chairlift.engine.explanation.explained_span import BatchMember, ExplainedSpan, describe_preemption, describe_span
from chairlift.engine.explanation.queue_position import QueueOrder
from chairlift.engine.explanation.what_if import BlockedRequest, RequestSize, WhatIf
from chairlift.events import EngineStarted
from chairlift.observability.queue_timeline import BlockHolder, QueueInterval
from chairlift.observability.tracked_request import TrackedRequest, WaitSpan
from chairlift.observability.tracker import RequestTracker

MAX_HOLDERS_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Viewer:
    """The rights of an API key: it sees requests of its tenant by name, and others by an opaque id and a size."""

    tenant: str = ""
    is_admin: bool = True
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)

    def can_see(self, tenant: str) -> bool:
        return self.is_admin or tenant == self.tenant

    def display_id(self, request_id: str, tenant: str) -> str:
        """The id of a request, or an opaque id that is always the same for this request."""
        return request_id if self.can_see(tenant) else self.hidden_id(request_id)

    def hidden_id(self, request_id: str) -> str:
        """An opaque id, which is always the same for this request."""
        return "other-" + hashlib.blake2s(request_id.encode(), key=self.secret, digest_size=4).hexdigest()


@dataclass(frozen=True, slots=True)
class ExplainedWait:
    """A wait after the arrival or after a preemption. Its spans cover the time from 0 to `seconds` without gaps.

    Attributes:
        text: why the request was preempted; None after its arrival.
    """

    cause: Literal["arrival", "preemption"]
    seconds: float
    spans: tuple[ExplainedSpan, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class ContentionCost:
    """The cost that other requests caused; times are in seconds.

    Attributes:
        queue_time: the first wait, up to now if it has not ended; preempted_time: all waits after preemptions.
        num_swaps: preemptions after which K and V were copied back from the swap space, so that nothing was recomputed.
        recomputed_tokens, recompute_time: tokens that were computed again after preemptions, and their time.
        padding_tokens: padding tokens of the request in a static batch.
        shared_steps_time: the additional time of the steps of the request for tokens of other requests.
    """

    queue_time: float
    preempted_time: float
    num_preemptions: int
    num_swaps: int
    recomputed_tokens: int
    recompute_time: float | None
    padding_tokens: int
    shared_steps_time: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The waits of one sequence and their causes.

    Attributes:
        queue_time: None until the first wait has ended.
        position: number of requests ahead in the queue; None if the request is not waiting.
        expected_wait: seconds until it is admitted if all requests reach their maximum lengths; None if unknown.
        rejection: the message of a rejected request.
        would_admit: changes, and whether they would have admitted the request when it first had to wait.
        draft_tokens, accepted_draft_tokens: draft tokens of speculative decoding that were verified and accepted.
        prefix: how far the hit in the prefix cache reached, and why not further; None before the first admission.
        replica: the id of the replica that computes the sequence; None if the model has no replicas.
        slo: its SLO, and why it was missed; None if it has none.
    """

    id: str
    state: str
    queue_time: float | None
    position: int | None
    expected_wait: float | None
    rejection: str | None
    waits: tuple[ExplainedWait, ...]
    would_admit: tuple[WhatIf, ...]
    contention: ContentionCost
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    prefix: str | None = None
    replica: str | None = None
    slo: ExplainedSLO | None = None


class BlockUse(NamedTuple):
    """A number of steps in which a request holds a number of blocks."""

    num_steps: int
    num_blocks: int


class Explainer:
    """Explains requests from the state of a tracker, without changing it."""

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker
        self._order = QueueOrder()

    def explain(
        self, request: TrackedRequest, viewer: Viewer, now: float, would_admit: Sequence[WhatIf]
    ) -> Explanation:
        """Explain one sequence.

        Args:
            now: seconds of the engine's clock.
            would_admit: the result of `what_ifs` for `blocked_request`, which may take long.
        """
        spans_by_wait = self._tracker.spans(request, now)
        waits = tuple(self._wait(request, viewer, index, spans) for index, spans in enumerate(spans_by_wait))
        position, expected_wait = self._forecast(request)
        return Explanation(
            id=request.request_id,
            state=request.state,
            queue_time=request.queue_time,
            position=position,
            expected_wait=expected_wait,
            rejection=request.rejection_message,
            waits=waits,
            would_admit=tuple(would_admit),
            contention=self._contention_cost(request, waits),
            draft_tokens=request.draft_tokens,
            accepted_draft_tokens=request.accepted_draft_tokens,
            prefix=None if request.first_scheduled is None else describe_prefix(request, is_admin=viewer.is_admin),
            slo=explain_slo(request, spans_by_wait, self._tracker.cost.line(), now),
        )

    # -- waits ---------------------------------------------------------------------------------------------------

    def _wait(self, request: TrackedRequest, viewer: Viewer, index: int, spans: Sequence[WaitSpan]) -> ExplainedWait:
        origin = request.waits[index].start
        explained = tuple(self._span(request, viewer, span, origin) for span in spans)
        seconds = explained[-1].end if explained else 0.0
        if not index:
            return ExplainedWait("arrival", seconds, explained)
        other = request.waits[index].displaced_by
        shown = None if other is None else self._shown_id(other, viewer)
        is_paced = self._started.pacing_tokens_per_second is not None
        text = describe_preemption(shown, self._started.scheduling_policy, is_paced=is_paced)
        return ExplainedWait("preemption", seconds, explained, text)

    def _shown_id(self, request_id: str, viewer: Viewer) -> str:
        """The id of a request that may not be tracked any more."""
        request = self._tracker.get(request_id)
        if request is None:
            return request_id if viewer.is_admin else viewer.hidden_id(request_id)
        return viewer.display_id(request_id, request.tenant)

    @property
    def _started(self) -> EngineStarted:
        """The configuration of the engine, whose event precedes the events of requests."""
        started = self._tracker.started
        assert started is not None
        return started

    def _span(self, request: TrackedRequest, viewer: Viewer, span: WaitSpan, origin: float) -> ExplainedSpan:
        explained = ExplainedSpan(span.reason, "", span.start - origin, span.end - origin, span.num_steps)
        if (interval := span.interval) is not None:
            is_head = interval.head_id == request.request_id
            needed, free, evictable, largest = _block_counts(interval)
            explained = replace(
                explained,
                head=None if interval.head_id is None else viewer.display_id(interval.head_id, interval.head_tenant),
                is_head=is_head,
                needed_blocks=needed,
                free_blocks=free,
                evictable_blocks=evictable,
                largest_free_piece=largest,
                num_running=interval.num_running,
                num_waiting=interval.num_waiting,
                largest_holders=tuple(
                    BatchMember(viewer.display_id(holder.arrived.request_id, holder.arrived.tenant), holder.num_blocks)
                    for holder in interval.holders[:MAX_HOLDERS_SHOWN]
                ),
                estimate=self._estimate(interval) if is_head else None,
            )
        num_seats = self._started.static_batch_size or self._started.max_num_seqs
        return replace(explained, text=describe_span(explained, self._started.scheduling_policy, num_seats))

    def _estimate(self, interval: QueueInterval) -> float | None:
        needed, free, _, _ = _block_counts(interval)
        return self._seconds_until_admitted(interval.holders, [BlockUse(1, needed or 0)], free, interval.num_running)

    # -- forecast ------------------------------------------------------------------------------------------------

    def _forecast(self, request: TrackedRequest) -> tuple[int | None, float | None]:
        """The position of a waiting request in the queue, and the expected seconds until it is admitted."""
        last = self._tracker.last_step
        if request.state != "waiting" or last is None or request.waits[-1].queued_step is None:
            return None, None
        ahead = self._ahead(request, self._tracker.waiting())
        started = self._started
        groups = KVGroups(tuple(started.kv_windows), started.block_size, started.max_num_batched_tokens)
        queue = [
            BlockUse(1 + entry.max_output_tokens - entry.num_output_tokens, _needed_blocks(entry, groups))
            for entry in (*ahead, request)
        ]
        holders = self._tracker.holders()
        # The counts of the last step are those before its requests ended.
        free_blocks, num_running = (last.free_blocks, last.num_running) if holders else (started.num_blocks, 0)
        return len(ahead), self._seconds_until_admitted(holders, queue, free_blocks, num_running)

    def _ahead(self, request: TrackedRequest, queued: list[TrackedRequest]) -> list[TrackedRequest]:
        """Those of the requests in the queue that are ahead of `request`."""
        last = self._tracker.last_step
        now, head_id = (-math.inf, None) if last is None else (last.scheduled_time, last.head_id)
        if not any(each is request for each in queued):
            queued.append(request)
        return self._order.requests_ahead(self._started, request, queued, now, head_id)

    def _seconds_until_admitted(
        self, holders: Sequence[BlockHolder], queue: Sequence[BlockUse], free_blocks: int, num_running: int
    ) -> float | None:
        steps = steps_until_admitted(self._running(holders), queue, free_blocks, self._free_seats(num_running))
        seconds = self._tracker.cost.seconds(num_running)
        return None if steps is None or seconds is None else max(1, steps) * seconds

    def _running(self, holders: Sequence[BlockHolder]) -> list[BlockUse]:
        budget = self._started.max_num_batched_tokens
        running = [
            BlockUse(h.num_left + -(-max(0, h.arrived.num_prompt_tokens - h.num_computed) // budget), h.num_blocks)
            for h in holders
        ]
        if self._started.batching != "static" or not running:
            return running
        longest = max(use.num_steps for use in running)
        return [use._replace(num_steps=longest) for use in running]

    def _free_seats(self, num_running: int) -> int:
        started = self._started
        if started.static_batch_size is None:
            return started.max_num_seqs - num_running
        return 0 if num_running else started.static_batch_size

    # -- changes that would have admitted it ---------------------------------------------------------------------

    def blocked_request(self, request: TrackedRequest) -> BlockedRequest | None:
        """The request with the state of the engine when it first had to wait in the queue; None if it did not, or if
        the engine has no KV pool."""
        waits = self._tracker.spans(request)
        interval = next((span.interval for span in waits[0] if span.interval is not None), None) if waits else None
        if interval is None or not self._started.num_blocks:
            return None
        is_head = interval.head_id == request.request_id
        needed, free, _, largest = _block_counts(interval)
        return BlockedRequest(
            started=self._started,
            reason=interval.reason or "unknown",
            request=RequestSize(request.arrived, needed=needed if is_head else None),
            holders=interval.holders,
            ahead=() if is_head else self._requests_ahead(request, interval),
            num_running=interval.num_running,
            free_blocks=free,
            largest_free_piece=interval.free_blocks if largest is None else largest,
        )

    def _requests_ahead(self, request: TrackedRequest, interval: QueueInterval) -> list[RequestSize]:
        step = max(interval.first_step, request.waits[0].queued_step or 0)
        queued = [other for other in self._tracker.requests() if _is_queued(other, step)]
        return [RequestSize(other.arrived) for other in self._ahead(request, queued)]

    # -- cost of other requests ----------------------------------------------------------------------------------

    def _contention_cost(self, request: TrackedRequest, waits: Sequence[ExplainedWait]) -> ContentionCost:
        line = self._tracker.cost.line()
        alone = None if line is None else line.base * request.num_steps + line.per_token * request.step_tokens
        return ContentionCost(
            queue_time=waits[0].seconds if waits else 0.0,
            preempted_time=sum(wait.seconds for wait in waits[1:]),
            num_preemptions=request.num_preemptions,
            num_swaps=request.num_swaps,
            recomputed_tokens=request.recompute_tokens,
            recompute_time=None if line is None else line.per_token * request.recompute_tokens,
            padding_tokens=request.padding_tokens,
            shared_steps_time=None if alone is None else max(0.0, request.step_seconds - alone),
        )


def _needed_blocks(request: TrackedRequest, groups: KVGroups) -> int:
    """The needed blocks in the last event of the request, or the blocks of all its tokens without sharing."""
    if request.waiting_event is not None:
        return request.waiting_event.needed_blocks
    return sum(groups.most_blocks(request.arrived.num_prompt_tokens + request.num_output_tokens))


def _is_queued(request: TrackedRequest, step: int) -> bool:
    return any(
        wait.queued_step is not None and wait.queued_step <= step and (wait.end_step is None or step < wait.end_step)
        for wait in request.waits
    )


def _block_counts(interval: QueueInterval) -> tuple[int | None, int, int, int | None]:
    """Needed, free and evictable blocks and the largest free piece, as in the event of the head if there was one."""
    event = interval.waiting_event
    if event is None:
        return None, interval.free_blocks, interval.evictable_blocks, None
    return event.needed_blocks, event.free_blocks, event.evictable_blocks, event.largest_free_piece


def steps_until_admitted(
    running: Iterable[BlockUse], queue: Iterable[BlockUse], free_blocks: int, free_seats: int
) -> int | None:
    """The number of steps until the last request of the queue is admitted; None if it never fits.

    Requests are assumed to be admitted in the order of the queue and to hold the same blocks until they end. Blocks
    that running requests will still allocate are not counted.
    """
    ends = [(use.num_steps, use.num_blocks) for use in running]
    heapq.heapify(ends)
    step = 0
    for queued in queue:
        while free_seats < 1 or free_blocks < queued.num_blocks:
            if not ends:
                return None
            step, num_blocks = heapq.heappop(ends)
            free_blocks += num_blocks
            free_seats += 1
        free_seats -= 1
        free_blocks -= queued.num_blocks
        heapq.heappush(ends, (step + queued.num_steps, queued.num_blocks))
    return step
