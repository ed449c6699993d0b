"""The endpoints /tokenize and /detokenize of vLLM."""

from __future__ import annotations

from typing import Final

from chairlift.errors import RequestError
from chairlift.server.api.endpoint import Endpoint
from chairlift.server.api.logprobs import token_text
from chairlift.server.preparation.conversation import ModelPlanner
from chairlift.server.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

MAX_CONTEXTS: Final = 8
"""The maximum number of token ids of one call to /detokenize, as a multiple of `max_model_len`."""


def _tokenize(planner: ModelPlanner, body: TokenizeRequest) -> bytes:
    engine = planner.engine
    if (chat := body.chat()) is not None:
        tokens = planner.prompt_token_ids(chat)
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


def _detokenize(planner: ModelPlanner, body: DetokenizeRequest) -> bytes:
    engine = planner.engine
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


TOKENIZE: Final = Endpoint(
    "/tokenize",
    "tokenize_text",
    "Convert a prompt or messages to token ids (vLLM).",
    TokenizeRequest,
    TokenizeResponse,
    _tokenize,
)
DETOKENIZE: Final = Endpoint(
    "/detokenize",
    "detokenize_ids",
    "Convert token ids to text (vLLM).",
    DetokenizeRequest,
    DetokenizeResponse,
    _detokenize,
)
