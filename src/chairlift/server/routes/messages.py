"""POST /v1/messages and /v1/messages/count_tokens; their errors have Anthropic's form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from chairlift.errors import ChairliftError
from chairlift.server.chat import ChatServing
from chairlift.server.http_errors import sentence
from chairlift.server.messages_api import MessagesServing, error_type
from chairlift.server.protocol import (
    AnsweredMessage,
    CountTokensRequest,
    MessagesError,
    MessagesErrorInfo,
    MessagesRequest,
    TokenCount,
)
from chairlift.server.routes.models import check_model
from chairlift.server.serving import error_body, error_headers
from chairlift.server.validation import describe


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_or_tell(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                return _error(400, describe(error)[0])
            except ChairliftError as error:
                return _error(error_body(error)[0], str(error), error_headers(error))
            except HTTPException as error:
                return _error(error.status_code, sentence(request, error))

        return handle_or_tell


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    body = MessagesError(error=MessagesErrorInfo(type=error_type(status), message=message))
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


def router(chat: ChatServing) -> APIRouter:
    """The routes over the conversations of the chat endpoint."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": MessagesError} for status in (400, 401, 404, 408, 413, 429, 503)
    }
    routes = APIRouter(route_class=_Route, responses=errors)
    serving = MessagesServing(chat)

    @routes.post("/v1/messages", response_model=AnsweredMessage)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        check_model(body.model, chat.model_name)
        return await serving.handle(body, request)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
        check_model(body.model, chat.model_name)
        with request.state.admission.counted(request.state.key):
            return TokenCount(input_tokens=await asyncio.to_thread(serving.count_tokens, body))

    return routes
