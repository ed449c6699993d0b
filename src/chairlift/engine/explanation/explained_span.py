"""A part of a wait with one reason, and the sentence that explains it."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.clock import format_duration
from chairlift.core.queues.request_queue import RequestQueue
from chairlift.counts import are, counted
from chairlift.policy_class import is_class_name, queue_class

OUTSIDE_QUEUE = {
    "next_step": "the engine was computing a step when the request arrived",
    "restart": "the engine was restarting",
    "unknown": "the events of these steps were lost",
    "sibling_prefill": "parked until a sibling has computed the prompt that both share",
}


HEAD_REASONS = {
    "srpt": "which has the least work left",
    "mlfq": "which received less service or was promoted after a long wait",
    "dlpm": "of whose prompt more was cached, or which was overtaken often",
    "edf": "whose SLO expires first, or whose turn it is",
}
"""Why the request at the head of the queue is ahead, for policies whose order is not visible in the requests."""

TURN_REASONS = {"dlpm": "which has a deficit left or a longer cached prefix"}
"""Why it is the turn of another tenant."""

PACED = "because it was ahead of its reader, or had the seat of a paused stream"

DISPLACING_REASONS = {
    "srpt": "which has less work left than it had",
    "mlfq": "which is at least two levels above it",
}
"""Why a request took the seat of another one."""


@dataclass(frozen=True, slots=True)
class BatchMember:
    """A running request, with the number of blocks that it holds."""

    id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ExplainedSpan:
    """A part of a wait with one reason.

    Counts describe the first step with the request at the head of the queue, or else the first step.

    Attributes:
        reason: a `WaitReason`, or "next_step", "restart" or "unknown" as in `WaitSpan`.
        text: one sentence with the reason and its numbers.
        start, end: seconds after the beginning of the wait.
        num_steps: number of steps that were scheduled without the request.
        head: the request at the head of the queue, which may be this one; None outside of the queue.
        needed_blocks, free_blocks, evictable_blocks, largest_free_piece: the values in the `RequestWaiting` event of
            the head.
        largest_holders: the running requests that hold the most blocks.
        estimate: expected seconds of the wait if the running requests reach their maximum lengths; None if the request
            is not at the head of the queue, or before the first steps.
    """

    reason: str
    text: str
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


def describe_preemption(displaced_by: str | None, policy: str, *, is_paced: bool = False) -> str:
    """Why a request was preempted under a scheduling policy; `displaced_by` is the request that took its seat."""
    if displaced_by is None:
        return "preempted for lack of memory, because it was the last running request in the order of the queue"
    is_own = is_class_name(policy) and queue_class(policy).displaces is not RequestQueue.displaces
    reason = DISPLACING_REASONS.get(policy, f"which {policy} prefers" if is_own or not is_paced else PACED)
    if is_paced and reason != PACED:
        reason += f", or {PACED}"
    return f"preempted: its seat was given to {displaced_by}, {reason}"


def describe_span(span: ExplainedSpan, policy: str, num_seats: int) -> str:
    """One sentence with the reason of a span under a scheduling policy, and its numbers; `num_seats` of the batch."""
    if (text := OUTSIDE_QUEUE.get(span.reason)) is not None:
        return text
    if span.reason == "fairness":
        turn = TURN_REASONS.get(policy, "which received less service")
        text = f"another tenant, {turn}, has its turn: {span.head} is at the head of the queue"
        return text + _running(span)
    text = _reason(span, num_seats) + _running(span) + _estimate(span)
    if span.is_head:
        return text
    reason = f", {HEAD_REASONS[policy]}" if policy in HEAD_REASONS else ""
    if is_class_name(policy):
        reason = f", which has a smaller key in {policy}"
    return f"behind {span.head} at the head of the queue{reason}: {text}"


def _reason(span: ExplainedSpan, num_seats: int) -> str:
    if span.reason == "seats":
        if (span.num_running or 0) < num_seats:
            return f"its beams need more seats than are free: {span.num_running} of {num_seats} are taken"
        return "the only seat is taken" if span.num_running == 1 else f"all {span.num_running} seats are taken"
    if span.reason == "batch":
        return f"a static batch of {span.num_running} is closed"
    if span.reason == "preemption":
        return f"a request was preempted in this step, so no request was admitted: {_blocks(span)}"
    if span.reason == "token_budget":
        return "its text is computed in one step, and the rest of the token budget of the step was smaller"
    if span.reason == "pending_token":
        return "the device has not returned the last token that was computed before the preemption"
    return _blocks(span)


def _blocks(span: ExplainedSpan) -> str:
    free = span.free_blocks or 0
    if span.needed_blocks is None:
        return f"{counted(free, 'block')} {are(free)} free"
    text = f"needs {counted(span.needed_blocks, 'block')}, {free} {are(free)} free"
    if span.evictable_blocks:
        text += f" ({span.evictable_blocks} of them evictable)"
    if span.largest_free_piece is not None and span.free_blocks and span.largest_free_piece < span.free_blocks:
        text += f", {span.largest_free_piece} in one piece"
    return text


def _running(span: ExplainedSpan) -> str:
    if not span.largest_holders:
        return ""
    largest = span.largest_holders[0]
    others = (span.num_running or 0) - 1
    others_text = f" and {others} other{'s' * (others > 1)}" if others > 0 else ""
    return f"; running: {largest.id} ({counted(largest.num_blocks, 'block')}){others_text}"


def _estimate(span: ExplainedSpan) -> str:
    if not span.is_head:
        return ""
    return f"; estimated wait: {'unknown' if span.estimate is None else format_duration(span.estimate)}"
