"""Request plans, which contain the prompts and parameters of a request, and the planners that create them."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, TypeVar

from chairlift.engine.input_processor import RequestLimits
from chairlift.errors import RequestError
from chairlift.sampling_params import SamplingParams
from chairlift.server.api.protocol.base import RequestBody


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The prompts and sampling parameters of a request. Plans can be pickled.

    Attributes:
        prompts: The text (None if the request has token ids) and the token ids of each prompt.
        params: The sampling parameters.
        constraint_field: The field of the body that errors of `params.structured_outputs` name.
    """

    prompts: list[tuple[str | None, list[int]]]
    params: SamplingParams
    constraint_field: str


MAX_LOGPROB_ENTRIES: Final = 4 << 20
"""The maximum number of logprobs in the response to one call. Each has about 60 bytes."""

Fields = TypeVar("Fields", bound=RequestBody)
Result = TypeVar("Result")


class RequestPlanner(ABC, Generic[Fields, Result]):
    """Converts the validated body of one endpoint to a plan, or to the response of an endpoint that needs no engine.

    Attributes:
        body_type: The pydantic model of the body.
        content_fields: Fields of the body that are not read after planning, with their empty values. They may be large,
            so a preparation worker does not send them back.
    """

    body_type: type[Fields]
    content_fields: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def plan(self, body: Fields) -> Result:
        """Plan a body. This takes time in proportion to the size of the body.

        Raises:
            RequestError: The request is invalid or exceeds a limit.
        """

    def has_template(self, body: Fields) -> bool:
        """Whether the body contains a chat template."""
        return getattr(body, "chat_template", None) is not None

    def without_content(self, body: Fields) -> Fields:
        """A copy of the body with empty `content_fields`."""
        return body.model_copy(update=self.content_fields)


def check_logprobs(plan: RequestPlan, limits: RequestLimits) -> None:
    """Raise RequestError if the response to a plan may have more than MAX_LOGPROB_ENTRIES logprobs."""
    params, entries = plan.params, 0
    for _text, token_ids in plan.prompts:
        if params.prompt_logprobs is not None:
            entries += len(token_ids) * params.n * (params.prompt_logprobs + 1)
        if params.logprobs is not None:
            room = limits.max_output_tokens(len(token_ids))
            entries += (params.max_tokens or room) * params.n * (params.logprobs + 1)
    if entries > MAX_LOGPROB_ENTRIES:
        raise RequestError(
            f"logprobs: the response may have up to {entries} entries (tokens x answers x logprobs), and at most "
            f"{MAX_LOGPROB_ENTRIES} are allowed: lower max_tokens, n or the number of logprobs, or send fewer prompts",
            "logprobs",
        )


@contextlib.contextmanager
def attribute_errors_to(field: str) -> Iterator[None]:
    """Make errors of `structured_outputs` in the block name `field`, from which the constraint was taken."""
    try:
        yield
    except RequestError as error:
        if field == "structured_outputs" or not (error.param or "").startswith("structured_outputs."):
            raise
        reason = str(error).removeprefix(error.param or "").removeprefix(" ")
        raise RequestError(f"{field}: its schema {reason}", field) from None


@contextlib.contextmanager
def rename_fields_in_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors that the block raises.

    Args:
        names: The name of a field at this endpoint, by its name in chat completions.
    """
    try:
        yield
    except RequestError as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        raise RequestError(str(error).replace(error.param or "", name), name) from None


@contextlib.contextmanager
def rename_limit_in_errors(name: str) -> Iterator[None]:
    """Replace `max_tokens` with `name` in errors that the block raises.

    Only errors of `max_tokens` and `min_tokens` are changed, because errors of other fields may quote the request.
    """
    try:
        yield
    except RequestError as error:
        if name == "max_tokens" or error.param not in ("max_tokens", "min_tokens"):
            raise
        param = name if error.param == "max_tokens" else error.param
        raise RequestError(re.sub(r"\bmax_tokens\b", name, str(error)), param) from None
