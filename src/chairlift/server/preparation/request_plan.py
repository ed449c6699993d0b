"""Request plans, which contain the prompts and parameters of a request, and the fields that their errors name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
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
        constraint_field: the field of the body that errors of `params.structured_outputs` name.
        ignored: the fields of the body that have no effect with this model.
        clamps_max_tokens: `max_tokens` is lowered to what fits beside a prompt.
    """

    prompts: list[tuple[str | None, list[int]]]
    params: SamplingParams
    constraint_field: str
    ignored: tuple[str, ...] = field(default=(), kw_only=True)
    clamps_max_tokens: bool = field(default=False, kw_only=True)

    def params_for(self, num_prompt_tokens: int, limits: RequestLimits) -> SamplingParams:
        """The sampling parameters for a prompt of this length."""
        room = limits.max_output_tokens(num_prompt_tokens)
        if not self.clamps_max_tokens or self.params.max_tokens is None or self.params.max_tokens <= room:
            return self.params
        return replace(self.params, max_tokens=room)


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


@contextlib.contextmanager
def attribute_errors_to(field: str) -> Iterator[None]:
    """Make errors of `structured_outputs` in the block name `field`, from which the constraint was taken.

    Those of the grammar of tool calls name `tools`.
    """
    try:
        yield
    except RequestError as error:
        if error.param == "structured_outputs.calls":
            field = "tools"
        elif field == "structured_outputs" or not (error.param or "").startswith("structured_outputs."):
            raise
        reason = str(error).removeprefix(error.param or "").removeprefix(" ")
        raise RequestError(f"{field}: its schema {reason}", field) from None


@contextlib.contextmanager
def rename_fields_in_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors that the block raises.

    Only the field of the error is renamed, and `max_tokens` in errors of `min_tokens`, because other words of a message
    may be a quotation from the request.

    Args:
        names: the name of a field at this endpoint, by its name in chat completions.
    """
    try:
        yield
    except RequestError as error:
        field = error.param or ""
        renamed = "max_tokens" if field == "min_tokens" else field
        if renamed not in names:
            raise
        message = re.sub(rf"\b{renamed}\b", names[renamed], str(error))
        raise RequestError(message, names.get(field, field), error.code) from None
