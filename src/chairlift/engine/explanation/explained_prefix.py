"""Describes what the prefix cache had of the prompt of a request, and why not more."""

from __future__ import annotations

from typing import Final

from chairlift.observability.tracked_request import TrackedRequest
from chairlift.outputs import MissReason, PrefixMatch

REASONS: Final = {
    MissReason.NEVER_SEEN: "the rest is new",
    MissReason.IN_PROGRESS: "a running request is computing the rest",
    MissReason.OTHER_ADAPTER: "the rest was computed with another LoRA adapter, or before it was loaded again",
    MissReason.OTHER_SALT: "the rest was computed for another cache_salt or API key",
    MissReason.CHECKPOINT_MISSING: "K and V of the rest are there, but not in all layers",
    MissReason.PROMPT_LOGPROBS: "prompt_logprobs needs the logits of the whole prompt",
}


def describe_prefix(request: TrackedRequest, *, is_admin: bool) -> str:
    """How far the hit of an admitted request in the prefix cache reached, and why not further.

    Args:
        is_admin: the text may name requests of others.
    """
    cached, matched, prefix = request.num_cached_tokens, request.num_matched_tokens, request.prefix
    text = f"{cached:,} of {request.arrived.num_prompt_tokens:,} prompt tokens were cached"
    if prefix is not None and prefix.num_disk_tokens:
        text += f", {prefix.num_disk_tokens:,} of them on disk"
    if matched > cached:
        last = (
            f"their last checkpoint of recurrent state is at {cached:,}" if cached else "none of their states is kept"
        )
        return f"{text}: K and V of {matched:,} were, but {last}"
    if prefix is None or prefix.reason is None:
        return text
    return f"{text}: {_describe_miss(prefix if is_admin else prefix.for_caller())}"


def _describe_miss(prefix: PrefixMatch) -> str:
    if prefix.reason == MissReason.DIFFERS:
        other = "an earlier prompt" if prefix.other_id is None else f"the prompt of {prefix.other_id}"
        repeated = f"which has about {prefix.num_repeated_tokens:,} of the tokens after it, too"
        return f"token {prefix.position:,} differs from {other}, {repeated}"
    if prefix.reason == MissReason.EVICTED:
        by = "" if prefix.other_id is None else f" by {prefix.other_id}"
        idle = "" if prefix.idle_seconds is None else f" after {prefix.idle_seconds:,.1f} s without use"
        return f"the rest was evicted{by}{idle}"
    return REASONS[MissReason(prefix.reason or "")]
