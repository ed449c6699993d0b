"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.server.chat import ChatServing
from chairlift.server.completions import CompletionServing
from chairlift.server.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    ErrorBody,
)
from chairlift.server.routes.models import check_model

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 503)
}


def router(chat: ChatServing) -> APIRouter:
    """The routes of the two older endpoints that generate."""
    routes = APIRouter(responses=ERRORS)
    completions = CompletionServing(chat.llm, chat.model_name)

    @routes.post("/v1/completions", response_model=Completion)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        check_model(body.model, chat.model_name)
        return await completions.handle(body, request)

    @routes.post("/v1/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        check_model(body.model, chat.model_name)
        return await chat.handle(body, request)

    return routes
