"""Planners: parse and validate the bodies of an endpoint, and turn them into plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from chairlift.engine.served_engine import ServedEngine
from chairlift.errors import RequestError
from chairlift.server.http.body_limits import check_depth
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.preparation.conversation import ConversationPlanner
from chairlift.server.preparation.request_plan import rename_fields_in_errors
from chairlift.server.protocol.base import RequestBody
from chairlift.server.protocol.validation_errors import describe_validation_errors

Fields = TypeVar("Fields", bound=RequestBody)
Result = TypeVar("Result")


class PlanningModel:
    """What planning needs of a model: in the server, or in a preparation worker, which has no engine.

    Attributes:
        conversations: plans requests with messages.
        options: how the API renders prompts and parses answers.
    """

    def __init__(self, engine: ServedEngine, options: ApiOptions) -> None:
        self.engine = engine
        self.options = options
        self.conversations = ConversationPlanner(engine, options)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid body without its `content_fields`, and its plan."""

    body: Any
    plan: Any


@dataclass(frozen=True, slots=True)
class RequestPlanner(Generic[Fields, Result]):
    """Converts the bodies of one endpoint to plans, or to responses if it needs no engine. It can be pickled.

    Attributes:
        body_type: the pydantic model of the body.
        function: plans a valid body for a model, in time proportional to its size.
    """

    body_type: type[Fields]
    function: Callable[[PlanningModel, Fields], Result]

    def plan(self, model: PlanningModel, body: Fields) -> Result:
        """Plan a body; raises RequestError if the request is invalid or exceeds a limit."""
        with rename_fields_in_errors(body.chat_field_names):
            return self.function(model, body)

    def prepare(self, model: PlanningModel, raw: bytes) -> PreparedRequest:
        """Parse, validate and plan a body; raises RequestError."""
        body = parse_body(self.body_type, raw)
        plan = self.plan(model, body)  # This may also determine private attributes of the body.
        return PreparedRequest(body.without_content(), plan)


Planners = Mapping[str, RequestPlanner[Any, Any]]
"""Path of an endpoint -> its planner."""


def parse_body(body_type: type[Fields], raw: bytes) -> Fields:
    """Parse and validate a body; raises RequestError."""
    check_depth(raw)
    try:
        given = from_json(raw)  # Unlike the standard library's parser it rejects unpaired surrogates.
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    try:
        return body_type.model_validate(given)
    except ValidationError as error:
        raise RequestError(*describe_validation_errors(error.errors(), given)) from None
