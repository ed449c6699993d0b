"""Request plans, which contain the prompts and parameters of a request, and the limit of their logprobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from chairlift.engine.input_processor import RequestLimits
from chairlift.errors import RequestError
from chairlift.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The prompts and sampling parameters of a request. Plans can be pickled.

    Attributes:
        prompts: the text (None if the request has token ids) and the token ids of each prompt.
        params: the sampling parameters.
        ignored: the fields of the body that have no effect with this model.
        clamps_max_tokens: `max_tokens` is lowered to what fits beside a prompt.
    """

    prompts: list[tuple[str | None, list[int]]]
    params: SamplingParams
    ignored: tuple[str, ...] = field(default=(), kw_only=True)
    clamps_max_tokens: bool = field(default=False, kw_only=True)


MAX_LOGPROB_ENTRIES: Final = 4 << 20
"""The maximum number of logprobs in the response to one call. Each has about 60 bytes."""


def check_logprobs(plan: RequestPlan, limits: RequestLimits) -> None:
    """Raise RequestError if the response to a plan may have more than MAX_LOGPROB_ENTRIES logprobs."""
    params, entries = plan.params, 0
    for _text, token_ids in plan.prompts:
        if params.prompt_logprobs is not None:
            entries += len(token_ids) * params.n * (params.prompt_logprobs + 1)
        if params.logprobs is not None:
            room = limits.default_max_tokens(len(token_ids))
            entries += min(params.max_tokens or room, room) * params.n * (params.logprobs + 1)
    if entries > MAX_LOGPROB_ENTRIES:
        raise RequestError(
            f"logprobs: the response may have up to {entries} entries (tokens x answers x logprobs), and at most "
            f"{MAX_LOGPROB_ENTRIES} are allowed: lower max_tokens, n or the number of logprobs, or send fewer prompts",
            "logprobs",
        )
