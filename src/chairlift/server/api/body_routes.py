"""The endpoints with a request body, and their routes. A preparation worker parses large bodies, not FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from chairlift.errors import RequestError
from chairlift.server.http.body_limits import LARGE_BODY, check_depth
from chairlift.server.http.error_responses import NOT_JSON_MESSAGE
from chairlift.server.http.streaming import cancel_on_disconnect
from chairlift.server.models.model_calls import CallFields, ModelCalls, read_call_fields
from chairlift.server.preparation.preparation import Preparation
from chairlift.server.protocol.base import ErrorBody
from chairlift.server.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from chairlift.server.protocol.completions import CompletionRequest, CompletionResponse
from chairlift.server.protocol.messages import (
    CountTokensRequest,
    MessagesError,
    MessagesRequest,
    MessagesResponse,
    TokenCount,
)
from chairlift.server.protocol.pooling import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from chairlift.server.protocol.responses import ResponseObject, ResponsesRequest
from chairlift.server.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

GENERATION_ERRORS: Final = (400, 401, 404, 408, 413, 429, 503)
"""The statuses of the errors of endpoints that generate."""


def prepared_route_class(calls: ModelCalls, preparation: Preparation, max_json_depth: int) -> type[APIRoute]:
    """Create the route class of endpoints with a request body.

    Args:
        preparation: checks large bodies on threads.
        max_json_depth: the maximum nesting depth of arrays and objects in a body.
    """
    parse_lock = asyncio.Lock()

    class PreparedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle_small = super().get_route_handler()

            async def handle(request: Request) -> Response:
                body = await request.body()
                slot = request.app.state.admission.reserve_slot(request.state.key)
                request.state.slot = slot
                try:
                    if len(body) < LARGE_BODY:
                        # Only one small body is parsed in each iteration of the event loop. Otherwise many bodies that
                        # arrive together would delay all other work.
                        async with parse_lock:
                            await asyncio.sleep(0)
                        check_depth(body, max_json_depth)
                    elif not _is_json(request):
                        raise RequestError(NOT_JSON_MESSAGE)
                    else:
                        fields = CallFields()
                        if calls.needs_fields:
                            fields = await preparation.run(read_call_fields, body)
                        return await cancel_on_disconnect(request, handle_large(request, fields))
                    del body
                    return await cancel_on_disconnect(request, handle_small(request))
                finally:
                    slot.close()

            async def handle_large(request: Request, fields: CallFields) -> Response:
                async with calls.lease(self.path, fields, request) as lease:
                    service, body = lease.service, await request.body()
                    if not service.preparation.should_use_worker(body):
                        await preparation.run(check_depth, body, max_json_depth)
                        del body
                        return await handle_small(request)
                    request._body = b""  # The body is not read again, but the request exists until its stream ends.
                    prepared = await service.preparation.prepare(request.state.key.tenant, self.path, body)
                    del body
                    request.state.release_body()
                    calls.check(prepared.body, lease, request)
                    return await service.endpoints[self.path].respond(prepared.body, request, prepared.plan)

            return handle

    return PreparedRoute


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def body_routers(calls: ModelCalls, route_class: type[APIRoute]) -> list[APIRouter]:
    """The routes of endpoints with a request body."""
    return [
        _openai_router(calls, route_class),
        _anthropic_router(calls, route_class),
        _pooling_router(calls, route_class),
    ]


def _error_responses(model: type[BaseModel], statuses: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": model} for status in statuses}


def _openai_router(calls: ModelCalls, route_class: type[APIRoute]) -> APIRouter:
    routes = APIRouter(responses=_error_responses(ErrorBody, (400, 404, 429, 503)), route_class=route_class)
    generation_errors = _error_responses(ErrorBody, GENERATION_ERRORS)

    @routes.post("/v1/completions", response_model=CompletionResponse, responses=generation_errors)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts (OpenAI)."""
        return await calls.respond("/v1/completions", body, request)

    @routes.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses=generation_errors)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Generate the next message of a conversation (OpenAI)."""
        return await calls.respond("/v1/chat/completions", body, request)

    @routes.post("/v1/responses", response_model=ResponseObject, responses=generation_errors)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Generate a response to input items (OpenAI)."""
        return await calls.respond("/v1/responses", body, request)

    @routes.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize_text(body: TokenizeRequest, request: Request) -> Response:
        """Convert a prompt or messages to token ids (vLLM)."""
        return await calls.respond("/tokenize", body, request)

    @routes.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize_ids(body: DetokenizeRequest, request: Request) -> Response:
        """Convert token ids to text (vLLM)."""
        return await calls.respond("/detokenize", body, request)

    return routes


def _pooling_router(calls: ModelCalls, route_class: type[APIRoute]) -> APIRouter:
    routes = APIRouter(responses=_error_responses(ErrorBody, GENERATION_ERRORS), route_class=route_class)

    @routes.post("/v1/embeddings", response_model=EmbeddingResponse)
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Compute the vectors of texts (OpenAI)."""
        return await calls.respond("/v1/embeddings", body, request)

    @routes.post("/score", response_model=ScoreResponse, include_in_schema=False)
    @routes.post("/v1/score", response_model=ScoreResponse)
    async def create_scores(body: ScoreRequest, request: Request) -> Response:
        """Compute the scores of pairs of texts (vLLM)."""
        return await calls.respond("/v1/score", body, request)

    @routes.post("/rerank", response_model=RerankResponse, include_in_schema=False)
    @routes.post("/v1/rerank", response_model=RerankResponse)
    async def rerank_documents(body: RerankRequest, request: Request) -> Response:
        """Sort documents by their relevance for a query (Jina, Cohere)."""
        return await calls.respond("/v1/rerank", body, request)

    return routes


def _anthropic_router(calls: ModelCalls, route_class: type[APIRoute]) -> APIRouter:
    routes = APIRouter(responses=_error_responses(MessagesError, GENERATION_ERRORS), route_class=route_class)

    @routes.post("/v1/messages", response_model=MessagesResponse)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Generate the next message of a conversation (Anthropic)."""
        return await calls.respond("/v1/messages", body, request)

    @routes.post("/v1/messages/count_tokens", response_model=TokenCount)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Count the prompt tokens of a conversation (Anthropic)."""
        return await calls.respond("/v1/messages/count_tokens", body, request)

    return routes
