"""The endpoints /tokenize and /detokenize, whose planners compute the response body."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.engine.served_engine import ServedEngine
from chairlift.errors import RequestError
from chairlift.server.api.conversation import ConversationPlanner
from chairlift.server.api.logprobs import token_text
from chairlift.server.api.prepared_route import PreparedRoutes
from chairlift.server.api.protocol.base import ErrorBody
from chairlift.server.api.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from chairlift.server.api.serving import UtilityServing
from chairlift.server.preparation.request_plan import RequestPlanner

MAX_CONTEXTS: Final = 8
"""The maximum number of token ids of one call to /detokenize, as a multiple of `max_model_len`."""


class TokenizePlanner(RequestPlanner[TokenizeRequest, bytes]):
    """Tokenizes a prompt or a conversation."""

    body_type = TokenizeRequest
    content_fields: ClassVar[dict[str, Any]] = {"prompt": None, "messages": None, "tools": None}

    def __init__(self, engine: ServedEngine, conversations: ConversationPlanner) -> None:
        self._engine = engine
        self._conversations = conversations

    def plan(self, body: TokenizeRequest) -> bytes:
        tokens = self._tokens(body)
        tokenizer = self._engine.tokenizer
        strings = [token_text(tokenizer.token_bytes(token)) for token in tokens] if body.return_token_strs else None
        response = TokenizeResponse(
            count=len(tokens),
            max_model_len=self._engine.facts.scheduler_config.max_model_len,
            tokens=tokens,
            token_strs=strings,
        )
        return response.model_dump_json(exclude_none=True).encode()

    def _tokens(self, body: TokenizeRequest) -> list[int]:
        conversation = body.chat()
        if conversation is not None:
            return self._conversations.prompt_token_ids(conversation)
        adds_special = body.add_special_tokens is not False
        return self._engine.input_processor.encode_text(body.prompt or "", "prompt", add_special_tokens=adds_special)


class DetokenizePlanner(RequestPlanner[DetokenizeRequest, bytes]):
    """Converts token ids to text."""

    body_type = DetokenizeRequest
    content_fields: ClassVar[dict[str, Any]] = {"tokens": []}

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def plan(self, body: DetokenizeRequest) -> bytes:
        vocab_size = self._engine.facts.model_config.vocab_size
        limit = MAX_CONTEXTS * self._engine.facts.scheduler_config.max_model_len
        if len(body.tokens) > limit:
            raise RequestError(
                f"tokens must have at most {limit} token ids ({MAX_CONTEXTS} x max_model_len), got {len(body.tokens)}: "
                "split them into several calls",
                "tokens",
            )
        if (largest := max(body.tokens, default=0)) >= vocab_size:
            raise RequestError(f"tokens must be token ids from 0 to {vocab_size - 1}, got {largest}", "tokens")
        text = self._engine.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return DetokenizeResponse(prompt=text).model_dump_json().encode()


def router(
    tokenize: UtilityServing[TokenizeRequest], detokenize: UtilityServing[DetokenizeRequest], prepared: PreparedRoutes
) -> APIRouter:
    """The routes of /tokenize and /detokenize."""
    endpoints = {"/tokenize": ("tokenize", tokenize.answer), "/detokenize": ("detokenize", detokenize.answer)}
    errors: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 404, 429, 503)}
    routes = APIRouter(responses=errors, route_class=prepared.route_class(endpoints))

    @routes.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize_text(body: TokenizeRequest, request: Request) -> Response:
        """Convert a prompt or messages to token ids (vLLM)."""
        return await tokenize.handle(body, request)

    @routes.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize_ids(body: DetokenizeRequest, request: Request) -> Response:
        """Convert token ids to text (vLLM)."""
        return await detokenize.handle(body, request)

    return routes
