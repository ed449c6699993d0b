"""The endpoints with a request body, and their routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from chairlift.engine.async_llm import AsyncLLM
from chairlift.server.api.chat import ChatServing
from chairlift.server.api.completions import CompletionServing
from chairlift.server.api.messages import MessagesServing, with_messages_errors
from chairlift.server.api.protocol.base import ErrorBody
from chairlift.server.api.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from chairlift.server.api.protocol.completions import CompletionRequest, CompletionResponse
from chairlift.server.api.protocol.messages import (
    CountTokensRequest,
    MessagesError,
    MessagesRequest,
    MessagesResponse,
    TokenCount,
)
from chairlift.server.api.protocol.responses import ResponseObject, ResponsesRequest
from chairlift.server.api.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from chairlift.server.api.responses import ResponsesServing
from chairlift.server.api.serving import Endpoint, UtilityServing
from chairlift.server.preparation.planners import Planners
from chairlift.server.preparation.preparation import Preparation

SERVINGS: Final[dict[str, type[Endpoint[Any, Any]]]] = {
    "/v1/completions": CompletionServing,
    "/v1/chat/completions": ChatServing,
    "/v1/messages": MessagesServing,
    "/v1/messages/count_tokens": UtilityServing,
    "/v1/responses": ResponsesServing,
    "/tokenize": UtilityServing,
    "/detokenize": UtilityServing,
}
"""Path -> the class that answers its calls."""


def make_endpoints(
    llm: AsyncLLM, model_name: str, planners: Planners, preparation: Preparation
) -> dict[str, Endpoint[Any, Any]]:
    """Create the endpoints with a request body, by their paths."""
    return {path: serving(llm, model_name, planners[path], preparation) for path, serving in SERVINGS.items()}


def body_routers(endpoints: Mapping[str, Endpoint[Any, Any]], route_class: type[APIRoute]) -> list[APIRouter]:
    """The routes of endpoints with a request body. The error responses of /v1/messages have the form of Anthropic."""
    return [
        _generation_router(endpoints, route_class),
        _messages_router(endpoints, with_messages_errors(route_class)),
        _tokenization_router(endpoints, route_class),
    ]


def _error_responses(model: type[ErrorBody | MessagesError], *statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": model} for status in statuses}


def _generation_router(endpoints: Mapping[str, Endpoint[Any, Any]], route_class: type[APIRoute]) -> APIRouter:
    errors = _error_responses(ErrorBody, 400, 401, 404, 408, 413, 429, 503)
    routes = APIRouter(responses=errors, route_class=route_class)

    @routes.post("/v1/completions", response_model=CompletionResponse)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts (OpenAI)."""
        return await endpoints["/v1/completions"].respond(body, request)

    @routes.post("/v1/chat/completions", response_model=ChatCompletionResponse)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Generate the next message of a conversation (OpenAI)."""
        return await endpoints["/v1/chat/completions"].respond(body, request)

    @routes.post("/v1/responses", response_model=ResponseObject)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Generate a response to input items (OpenAI)."""
        return await endpoints["/v1/responses"].respond(body, request)

    return routes


def _messages_router(endpoints: Mapping[str, Endpoint[Any, Any]], route_class: type[APIRoute]) -> APIRouter:
    errors = _error_responses(MessagesError, 400, 401, 404, 408, 413, 429, 503)
    routes = APIRouter(responses=errors, route_class=route_class)

    @routes.post("/v1/messages", response_model=MessagesResponse)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Generate the next message of a conversation (Anthropic)."""
        return await endpoints["/v1/messages"].respond(body, request)

    @routes.post("/v1/messages/count_tokens", response_model=TokenCount)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Count the prompt tokens of a conversation (Anthropic)."""
        return await endpoints["/v1/messages/count_tokens"].respond(body, request)

    return routes


def _tokenization_router(endpoints: Mapping[str, Endpoint[Any, Any]], route_class: type[APIRoute]) -> APIRouter:
    routes = APIRouter(responses=_error_responses(ErrorBody, 400, 404, 429, 503), route_class=route_class)

    @routes.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize_text(body: TokenizeRequest, request: Request) -> Response:
        """Convert a prompt or messages to token ids (vLLM)."""
        return await endpoints["/tokenize"].respond(body, request)

    @routes.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize_ids(body: DetokenizeRequest, request: Request) -> Response:
        """Convert token ids to text (vLLM)."""
        return await endpoints["/detokenize"].respond(body, request)

    return routes
