"""POST /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.server.chat import ChatServing
from chairlift.server.protocol import ErrorBody, ResponseObject, ResponsesRequest
from chairlift.server.responses_api import ResponsesServing
from chairlift.server.routes.models import check_model


def router(chat: ChatServing) -> APIRouter:
    """The route over the conversations of the chat endpoint."""
    routes = APIRouter(responses={status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 503)})
    serving = ResponsesServing(chat)

    @routes.post("/v1/responses", response_model=ResponseObject)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        check_model(body.model, chat.model_name)
        return await serving.handle(body, request)

    return routes
