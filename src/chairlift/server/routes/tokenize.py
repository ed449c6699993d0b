"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from chairlift.errors import RequestError
from chairlift.server.chat import ChatServing
from chairlift.server.logprobs import token_text
from chairlift.server.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorBody,
    TokenizeRequest,
    TokenizeResponse,
)
from chairlift.server.routes.models import check_model


def router(chat: ChatServing) -> APIRouter:
    """The routes over the tokenizer and chat template of an endpoint."""
    routes = APIRouter(responses={status: {"model": ErrorBody} for status in (400, 404, 429, 503)})
    engine = chat.llm.engine

    @routes.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
        check_model(body.model, chat.model_name)
        with request.state.admission.counted(request.state.key):
            tokens = await asyncio.to_thread(_tokens, body, chat)
        strings = [token_text(engine.tokenizer.token_bytes(token)) for token in tokens]
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=engine.scheduler_config.max_model_len,
            tokens=tokens,
            token_strs=strings if body.return_token_strs else None,
        )

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
        check_model(body.model, chat.model_name)
        if any(token >= engine.model_config.vocab_size for token in body.tokens):
            raise RequestError(f"tokens holds an id outside 0..{engine.model_config.vocab_size - 1}", "tokens")
        with request.state.admission.counted(request.state.key):
            text = await asyncio.to_thread(engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return DetokenizeResponse(prompt=text)

    return routes


def _tokens(body: TokenizeRequest, chat: ChatServing) -> list[int]:
    conversation = body.chat()
    if conversation is not None:
        return chat.conversations.prompt(conversation)
    adds_special = body.add_special_tokens is not False
    processor = chat.llm.engine.input_processor
    return processor.encode_text(body.prompt or "", "prompt", add_special_tokens=adds_special)
