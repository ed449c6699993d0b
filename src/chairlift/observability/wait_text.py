"""Waits in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.clock import in_words

if TYPE_CHECKING:
    from chairlift.observability.explain import ExplainedSpan

OUTSIDE = {
    "next_step": "handed over to the engine, which was computing a step",
    "restart": "the engine was being started again",
    "unknown": "the events of these steps were lost",
    "sibling_prefill": "parked until a sibling has computed the prompt that both share",
}


def describe(span: ExplainedSpan) -> str:
    """One sentence with the arithmetic."""
    if (text := OUTSIDE.get(span.reason)) is not None:
        return text
    if span.reason == "fairness":
        return f"it was the turn of another tenant, which had less service: {span.head} stood first{_who(span)}"
    why = _why(span)
    return why if span.is_head else f"behind {span.head} at the head of the queue: {why}"


def _why(span: ExplainedSpan) -> str:
    if span.reason == "seats":
        text = "the only seat was taken" if span.num_running == 1 else f"all {span.num_running} seats were taken"
    elif span.reason == "batch":
        text = f"a static batch of {span.num_running} was closed"
    elif span.reason == "preemption":
        text = f"somebody was preempted in this step, so nobody was admitted: {_blocks(span)}"
    elif span.reason == "pending_token":
        text = "its last token before the preemption was still on its way from the device"
    else:
        text = _blocks(span)
    return text + _who(span) + _estimate(span)


def _blocks(span: ExplainedSpan) -> str:
    if span.needed_blocks is None:
        return f"{span.free_blocks} blocks free"
    text = f"needs {span.needed_blocks} blocks, {span.free_blocks} free"
    if span.evictable_blocks:
        text += f" ({span.evictable_blocks} of them evictable)"
    if span.largest_free_piece is not None and span.free_blocks and span.largest_free_piece < span.free_blocks:
        text += f", {span.largest_free_piece} in one piece"
    return text


def _who(span: ExplainedSpan) -> str:
    if not span.behind:
        return ""
    first = span.behind[0]
    others = (span.num_running or 0) - 1
    return f"; behind {first.id}, which holds {first.num_blocks}" + (f", and {others} more" if others > 0 else "")


def _estimate(span: ExplainedSpan) -> str:
    if not span.is_head:
        return ""
    return "; for how long is not known yet" if span.estimate is None else f"; about {in_words(span.estimate)}"
