"""Plans: the prompts and parameters that a request asks the engine to run, and the planners that make them."""

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
    """What a request asks the engine to run. Plans are sent between processes.

    Attributes:
        prompts: text (None if the request has token ids) and token ids of each prompt.
        constraint_field: the field that errors of `params.structured_outputs` name.
    """

    prompts: list[tuple[str | None, list[int]]]
    params: SamplingParams
    constraint_field: str


MAX_LOGPROB_ENTRIES: Final = 4 << 20
"""Logprobs (one token at one position) in the answer to one call; each has some 60 bytes."""

Fields = TypeVar("Fields", bound=RequestBody)
Result = TypeVar("Result")


class RequestPlanner(ABC, Generic[Fields, Result]):
    """Turns the validated body of one endpoint into a plan, or into the answer of an endpoint that runs nothing.

    Attributes:
        body_type: the model of the body.
        content_fields: fields of the body that are not read after planning, and their empty values. They may be large,
            so a preparation worker does not send them back.
    """

    body_type: type[Fields]
    content_fields: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def plan(self, body: Fields) -> Result:
        """The result for a body. Computes for as long as the body is large.

        Raises:
            RequestError: the request cannot be honoured.
        """

    def has_template(self, body: Fields) -> bool:
        """Whether the body has a chat template of its own."""
        return getattr(body, "chat_template", None) is not None

    def without_content(self, body: Fields) -> Fields:
        """The body with its large fields emptied."""
        return body.model_copy(update=self.content_fields)


def check_logprobs(plan: RequestPlan, limits: RequestLimits) -> None:
    """Raise RequestError if the logprobs that a plan asks for have more than MAX_LOGPROB_ENTRIES."""
    params, entries = plan.params, 0
    for _text, token_ids in plan.prompts:
        if params.prompt_logprobs is not None:
            entries += len(token_ids) * params.n * (params.prompt_logprobs + 1)
        if params.logprobs is not None:
            room = limits.max_output_tokens(len(token_ids))
            entries += (params.max_tokens or room) * params.n * (params.logprobs + 1)
    if entries > MAX_LOGPROB_ENTRIES:
        raise RequestError(
            f"logprobs: the answer may have up to {entries} entries (tokens x answers x logprobs), and at most "
            f"{MAX_LOGPROB_ENTRIES} are allowed: lower max_tokens, n or the number of logprobs, or send fewer prompts",
            "logprobs",
        )


@contextlib.contextmanager
def attribute_errors_to(field: str) -> Iterator[None]:
    """Let errors of a constraint name the field of the request that it came from."""
    try:
        yield
    except RequestError as error:
        if field == "structured_outputs" or not (error.param or "").startswith("structured_outputs."):
            raise
        reason = str(error).removeprefix(error.param or "").removeprefix(" ")
        raise RequestError(f"{field}: its schema {reason}", field) from None


@contextlib.contextmanager
def rename_fields_in_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name fields as the endpoint does.

    Args:
        names: name of a field in a chat -> its name at this endpoint.
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
    """Let errors of token counts call `max_tokens` by the name that the endpoint has for it.

    Only errors of `max_tokens` and `min_tokens` are changed: errors of other fields may quote the request.
    """
    try:
        yield
    except RequestError as error:
        if name == "max_tokens" or error.param not in ("max_tokens", "min_tokens"):
            raise
        param = name if error.param == "max_tokens" else error.param
        raise RequestError(re.sub(r"\bmax_tokens\b", name, str(error)), param) from None
