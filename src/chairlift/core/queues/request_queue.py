"""The order of the queue and of the running batch: first come, first served; and priorities."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.request import Request
from chairlift.step_time import StepTime

Key = tuple[float, int, int]
"""Position of a request in an order: smaller keys go first, and keys are unique."""


class RequestQueue:
    """The waiting requests, first come, first served; a subclass has another order.

    Requests with smaller keys go first. The running request with the largest key is preempted first.

    Attributes:
        has_constant_keys: the key of a request never changes. Otherwise it changes between two steps, or when a request
            of the same tenant is admitted.
        is_fair: the queue gives turns to tenants.
        uses_priority: the `priority` of a request has an influence; otherwise a request with one is rejected.
        default_length_predictor: the length predictor of the configuration if it names none; a queue with another one
            than "none" needs predictions.
        keeps_tpot: the chunks of a step are also limited by the objectives of the time per output token.
        step_time: the estimated time of a step, which limits chunks; None if there is none.
    """

    has_constant_keys = True
    is_fair = uses_priority = keeps_tpot = False
    default_length_predictor = "none"
    step_time: StepTime | None = None

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def key(self, request: Request) -> Key:
        return (0.0, 0, request.arrival_index)

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        """Add a request; it may have run before."""
        insort(self._requests, request, key=self.key)

    def peek(self) -> Request | None:
        """The head of the queue; None if the queue is empty."""
        return self._requests[0] if self._requests else None

    def in_order(self) -> Iterable[Request]:
        """The waiting requests in the order in which they may pass a head that is blocked."""
        return self._requests

    def may_delay(self, request: Request, head: Request) -> bool:
        """Whether a request may pass a blocked head for a limited time, even if the head starts later for it."""
        return True

    def take(self, request: Request) -> Request:
        """Remove and return a request that is admitted: the head, or a request that passes it."""
        self.discard(request)
        return request

    def pop(self) -> Request:
        """Remove and return the head."""
        head = self.peek()
        assert head is not None, "the queue is not empty"
        return self.take(head)

    def discard(self, request: Request) -> None:
        """Remove a request, which is in the queue. Its key may have changed: an error drops its pending token."""
        self._requests.remove(request)

    def begin_step(self, now: float) -> None:
        """Called before a step is planned, with the time in seconds of the engine's clock."""

    def set_step_time(self, step_time: StepTime | None) -> None:
        """Use an estimate from the next step on."""
        self.step_time = step_time

    def displaces(self, head: Request, running: Request) -> bool:
        """Whether the head of the queue takes the seat of a running request, which is then preempted."""
        return False

    def displacing_head(self, running: Sequence[Request], kv: KVCacheManager, max_num_seqs: int) -> Request | None:
        """The head of the queue if it takes the seat of the last running request; None if it does not, if a seat is
        free or becomes free with the next result, or if it could not be admitted with one seat.

            seats:  [ a b c ]   queue: [ d e ]     srpt: d has less work left than c  ->  seats: [ a b d ]   [ e c ]

        Memory is not taken in this way: the preempted request keeps its blocks in the prefix cache, as long as no other
        request needs them, and then it recomputes little. One seat is taken per step.
        """
        if len(running) < max_num_seqs or not kv.can_preempt or (head := self.peek()) is None:
            return None
        last = running[-1]
        if (
            head.num_seats > 1
            or head.num_pending_tokens
            or last.num_tokens == last.end_total_tokens
            or not self.displaces(head, last)
        ):
            return None
        demand = kv.demand(head)
        return head if demand.needed <= demand.free else None

    def record_admission(self, request: Request) -> None:
        """Called when a request has been admitted to the batch."""

    def record_sampling(self, requests: Sequence[Request]) -> None:
        """Called when a step is planned that samples a token for each of these requests."""

    def record_accepted_drafts(self, request: Request, count: int) -> None:
        """Called when a step has given `count` more tokens to a request, which are accepted drafts."""

    def forget(self, request: Request) -> None:
        """Drop all that is kept for a request that has finished."""

    def record_remote_service(self, service: Mapping[str, float]) -> None:
        """Called between steps with the service that other engines gave to tenants since the last call."""


class PriorityQueue(RequestQueue):
    """The smaller `priority` first; first come, first served among equals."""

    uses_priority = True

    def key(self, request: Request) -> Key:
        return (0.0, request.priority, request.arrival_index)

    def may_delay(self, request: Request, head: Request) -> bool:
        return request.priority <= head.priority
