"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.server.endpoints import Endpoints
from chairlift.server.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    ErrorBody,
)
from chairlift.server.routes.prepared_route import FinishCall

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 503)
}


def router(endpoints: Endpoints) -> APIRouter:
    """The routes of completions and chat completions."""
    completions, chat = endpoints.completions, endpoints.chat
    finish: dict[str, tuple[str, FinishCall]] = {
        "/v1/completions": ("completions", completions.answer),
        "/v1/chat/completions": ("chat", chat.answer),
    }
    routes = APIRouter(responses=ERRORS, route_class=endpoints.route_class(finish))

    @routes.post("/v1/completions", response_model=Completion)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await completions.handle(body, request)

    @routes.post("/v1/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        return await chat.handle(body, request)

    return routes
