"""Explains why a request missed its SLO: the objective, and the decision that took most of its time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.clock import format_duration
from chairlift.observability.step_cost import CostLine
from chairlift.observability.tracked_request import TrackedRequest, WaitSpan

OWN_TOKENS: Final = "own_tokens"
SHARED_STEPS: Final = "shared_steps"
PREEMPTION: Final = "preemption"
DISPLACEMENT: Final = "displacement"

CAUSES: Final = {
    OWN_TOKENS: "its own tokens take that long, whatever else is scheduled",
    SHARED_STEPS: "its steps also computed tokens of other requests (--max-num-batched-tokens, --max-num-seqs)",
    PREEMPTION: "it was preempted because KV memory was short (--kv, --scheduling-policy)",
    DISPLACEMENT: "its seat was given to another request (--scheduling-policy, --pacing-tokens-per-second)",
    "seats": "other requests held all seats (--max-num-seqs, --scheduling-policy)",
    "memory": "other requests held the KV memory (--kv, --scheduling-policy)",
    "batch": "a static batch was closed (--batching static)",
    "token_budget": "it is computed in one step, and the token budget was used (--max-num-batched-tokens)",
    "fairness": "it was the turn of other tenants (--scheduling-policy fair or dlpm)",
    "sibling_prefill": "a sibling computed the prompt that both share",
    "next_step": "the engine was computing a step when it arrived",
    "restart": "the engine was restarting",
}
"""Cause -> a part of a sentence with the options that decide it."""


@dataclass(frozen=True, slots=True)
class ExplainedSLO:
    """The latencies of a request beside its SLO.

    Attributes:
        is_met: None while it is not known.
        missed: "ttft" or "tpot", the first objective that was missed; None if there is none.
        cause: what took most of the time of the missed objective: the reason of a wait, "preemption", "displacement",
            "shared_steps" or "own_tokens".
        cause_seconds: the time that it took.
        text: one sentence with these values.
    """

    ttft_ms: float | None
    tpot_ms: float | None
    is_met: bool | None
    missed: str | None
    cause: str | None
    cause_seconds: float | None
    text: str


def explain_slo(
    request: TrackedRequest, waits: Sequence[Sequence[WaitSpan]], line: CostLine | None, now: float
) -> ExplainedSLO | None:
    """Explain the SLO of a request; None if it has none.

    Args:
        waits: the spans of its waits, as `RequestTracker.spans` returns them.
        line: the cost of a step, which separates the time of its own tokens; None if it is not known.
    """
    slo = request.slo
    if slo is None:
        return None
    end = now if request.end_time is None else request.end_time
    ttft = (end if request.first_token is None else request.first_token) - request.arrived.time
    met = request.met_slo
    if slo.misses_ttft(ttft):
        missed, objective, latency = "ttft", slo.ttft_ms, ttft
        met = False if request.end_time is None else met
    elif slo.misses_tpot(request.tpot):
        missed, objective, latency = "tpot", slo.tpot_ms, request.tpot or 0.0
    else:
        unknown = "its SLO can still be met" if request.end_time is None else "it ended before its first token"
        text = {True: "its SLO is met", False: "it failed, so its SLO is not met", None: unknown}[met]
        return ExplainedSLO(slo.ttft_ms, slo.tpot_ms, met, None, None, None, text)
    causes = _causes(request, waits, line, until_first_token=missed == "ttft")
    cause, seconds = max(causes.items(), key=lambda each: each[1])
    reason = CAUSES.get(cause, f"it waited ({cause})")
    text = (
        f"{missed.upper()} {format_duration(latency)} exceeds its SLO of {objective:g} ms, mostly because {reason}: "
        f"{format_duration(seconds)}"
    )
    return ExplainedSLO(slo.ttft_ms, slo.tpot_ms, met, missed, cause, seconds, text)


def _causes(
    request: TrackedRequest, waits: Sequence[Sequence[WaitSpan]], line: CostLine | None, *, until_first_token: bool
) -> dict[str, float]:
    """Cause -> its seconds, until the first token or after it."""
    causes: dict[str, float] = defaultdict(float)
    for index, (wait, spans) in enumerate(zip(request.waits, waits, strict=True)):
        preemption = PREEMPTION if wait.displaced_by is None else DISPLACEMENT
        for span in spans:
            is_before = request.first_token is None or span.start < request.first_token
            if is_before is until_first_token:
                causes[preemption if index else span.reason] += span.end - span.start
    num_steps, seconds, num_tokens = request.num_steps, request.step_seconds, request.step_tokens
    if request.prefill is not None:
        before = request.prefill
        after = num_steps - before[0], seconds - before[1], num_tokens - before[2]
        num_steps, seconds, num_tokens = before if until_first_token else after
    own = seconds if line is None else min(seconds, line.base * num_steps + line.per_token * num_tokens)
    causes[OWN_TOKENS] += own
    causes[SHARED_STEPS] += seconds - own
    return causes
