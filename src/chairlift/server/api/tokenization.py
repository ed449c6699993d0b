"""Computes the responses of the endpoints that count tokens or convert between text and token ids."""

from __future__ import annotations

from typing import Final

from chairlift.engine.served_engine import ServedEngine
from chairlift.errors import RequestError
from chairlift.server.api.logprobs import token_text
from chairlift.server.preparation.conversation import ConversationPlanner
from chairlift.server.protocol.messages import CountTokensRequest, TokenCount
from chairlift.server.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

MAX_CONTEXTS: Final = 8
"""The maximum number of token ids of one call to /detokenize, as a multiple of `max_model_len`."""


def count_tokens(conversations: ConversationPlanner, body: CountTokensRequest) -> bytes:
    """The response of /v1/messages/count_tokens; raises RequestError."""
    return TokenCount(input_tokens=len(conversations.prompt_token_ids(body))).model_dump_json().encode()


def tokenize(engine: ServedEngine, conversations: ConversationPlanner, body: TokenizeRequest) -> bytes:
    """The response of /tokenize; raises RequestError."""
    if (chat := body.chat()) is not None:
        tokens = conversations.prompt_token_ids(chat)
    else:
        adds_special = body.add_special_tokens is not False
        tokens = engine.input_processor.encode_text(body.prompt or "", "prompt", add_special_tokens=adds_special)
    token_bytes = engine.tokenizer.token_bytes
    response = TokenizeResponse(
        count=len(tokens),
        max_model_len=engine.facts.scheduler_config.max_model_len,
        tokens=tokens,
        token_strs=[token_text(token_bytes(token)) for token in tokens] if body.return_token_strs else None,
    )
    return response.model_dump_json(exclude_none=True).encode()


def detokenize(engine: ServedEngine, body: DetokenizeRequest) -> bytes:
    """The response of /detokenize; raises RequestError."""
    vocab_size = engine.facts.model_config.vocab_size
    limit = MAX_CONTEXTS * engine.facts.scheduler_config.max_model_len
    if len(body.tokens) > limit:
        raise RequestError(
            f"tokens must have at most {limit} token ids ({MAX_CONTEXTS} x max_model_len), got {len(body.tokens)}: "
            "split them into several calls",
            "tokens",
        )
    if (largest := max(body.tokens, default=0)) >= vocab_size:
        raise RequestError(f"tokens must be token ids from 0 to {vocab_size - 1}, got {largest}", "tokens")
    text = engine.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=text).model_dump_json().encode()
