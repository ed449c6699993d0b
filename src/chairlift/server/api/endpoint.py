"""Endpoint: an endpoint with a request body, and everything that the server derives from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.responses import Response

from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.call import Call
from chairlift.server.http.error_responses import error_response
from chairlift.server.models.served_model import ModelLease
from chairlift.server.preparation.conversation import ModelPlanner
from chairlift.server.protocol.base import ErrorBody, ErrorInfo, RequestBody

Body = TypeVar("Body", bound=RequestBody)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of the errors of an endpoint: the type of their bodies, and the function that creates a response."""

    body: type[BaseModel]
    respond: Callable[[int, ErrorInfo, Mapping[str, str] | None], Response]


OPENAI_ERRORS = ErrorForm(ErrorBody, error_response)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body, Result]):
    """A path that accepts POST requests with a JSON body, and the functions that answer them.

    The routes, their description in OpenAPI, the admission of calls and the `url`s of batch files are derived from it.

    Attributes:
        name: the name of the operation in OpenAPI.
        description: one sentence for OpenAPI, with the API that the endpoint is from.
        body, response: the types of the bodies.
        plan: converts a valid body to a plan, on a thread; raises RequestError.
        serve: answers a call whose body has been planned. It raises ChairliftError before anything of the response is
            sent.
        aliases: other paths.
        id_prefix: the beginning of the ids of responses. Only an endpoint that sends requests to the engine has one.
        errors: the form of its errors.
    """

    path: str
    name: str
    description: str
    body: type[Body]
    response: type[BaseModel]
    plan: Callable[[ModelPlanner, Body], Result]
    serve: Callable[[CallContext, Body, Result], Awaitable[Response]]
    aliases: tuple[str, ...] = ()
    id_prefix: str = ""
    errors: ErrorForm = OPENAI_ERRORS


@dataclass(frozen=True, slots=True)
class CallContext:
    """What an endpoint needs to answer a call, besides its body."""

    endpoint: Endpoint[Any, Any]
    call: Call
    lease: ModelLease
    admission: AdmissionController


async def serve_planned(_context: CallContext, _body: RequestBody, content: bytes) -> Response:
    """Answer a call of an endpoint that runs nothing on the engine. Its plan is the body of the response."""
    return Response(content, media_type="application/json")
