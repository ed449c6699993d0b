"""POST /v1/messages and /v1/messages/count_tokens; their errors have Anthropic's form."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from chairlift.errors import ChairliftError
from chairlift.server.endpoints import Endpoints
from chairlift.server.http_errors import sentence
from chairlift.server.messages_api import error_type
from chairlift.server.protocol import (
    AnsweredMessage,
    CountTokensRequest,
    MessagesError,
    MessagesErrorInfo,
    MessagesRequest,
    TokenCount,
)
from chairlift.server.routes.prepared_route import FinishCall
from chairlift.server.serving import error_body, error_headers
from chairlift.server.validation import describe


def _with_messages_errors(base: type[APIRoute]) -> type[APIRoute]:
    """A route class whose errors have the form of Anthropic's API."""

    class MessagesRoute(base):  # type: ignore[misc, valid-type]
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_with_errors(request: Request) -> Response:
                try:
                    response: Response = await handle(request)
                except RequestValidationError as error:
                    return _error(400, describe(error)[0])
                except ChairliftError as error:
                    return _error(error_body(error)[0], str(error), error_headers(error))
                except HTTPException as error:
                    return _error(error.status_code, sentence(request, error))
                return response

            return handle_with_errors

    return MessagesRoute


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    body = MessagesError(error=MessagesErrorInfo(type=error_type(status), message=message))
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


def router(endpoints: Endpoints) -> APIRouter:
    """The routes of messages."""
    serving = endpoints.messages
    finish: dict[str, tuple[str, FinishCall]] = {
        "/v1/messages": ("messages", serving.answer),
        "/v1/messages/count_tokens": ("count_tokens", endpoints.finish_utility),
    }
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": MessagesError} for status in (400, 401, 404, 408, 413, 429, 503)
    }
    routes = APIRouter(route_class=_with_messages_errors(endpoints.route_class(finish)), responses=errors)

    @routes.post("/v1/messages", response_model=AnsweredMessage)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        return await serving.handle(body, request)

    @routes.post("/v1/messages/count_tokens", response_model=TokenCount)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        return await endpoints.run_utility(endpoints.planners.count_tokens, body, request)

    return routes
