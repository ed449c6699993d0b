"""POST /tokenize and /detokenize: planners whose result is the body of the answer."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from chairlift.engine.client import ServedEngine
from chairlift.errors import RequestError
from chairlift.server.conversation import Conversations
from chairlift.server.logprobs import token_text
from chairlift.server.preparation.plan import Planner
from chairlift.server.protocol import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse

MAX_CONTEXTS: Final = 8
"""How many times `max_model_len` token ids may be converted to text in one call."""


class TokenizePlanner(Planner[TokenizeRequest, bytes]):
    """Tokenizes a prompt or a conversation."""

    body_type = TokenizeRequest
    content_fields: ClassVar[dict[str, Any]] = {"prompt": None, "messages": None, "tools": None}

    def __init__(self, engine: ServedEngine, conversations: Conversations) -> None:
        self._engine = engine
        self._conversations = conversations

    def plan(self, body: TokenizeRequest) -> bytes:
        tokens = self._tokens(body)
        tokenizer = self._engine.tokenizer
        strings = [token_text(tokenizer.token_bytes(token)) for token in tokens] if body.return_token_strs else None
        response = TokenizeResponse(
            count=len(tokens),
            max_model_len=self._engine.scheduler_config.max_model_len,
            tokens=tokens,
            token_strs=strings,
        )
        return response.model_dump_json(exclude_none=True).encode()

    def _tokens(self, body: TokenizeRequest) -> list[int]:
        conversation = body.chat()
        if conversation is not None:
            return self._conversations.prompt(conversation)
        adds_special = body.add_special_tokens is not False
        return self._engine.input_processor.encode_text(body.prompt or "", "prompt", add_special_tokens=adds_special)


class DetokenizePlanner(Planner[DetokenizeRequest, bytes]):
    """Converts token ids to text."""

    body_type = DetokenizeRequest
    content_fields: ClassVar[dict[str, Any]] = {"tokens": []}

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def plan(self, body: DetokenizeRequest) -> bytes:
        vocab_size = self._engine.model_config.vocab_size
        limit = MAX_CONTEXTS * self._engine.scheduler_config.max_model_len
        if len(body.tokens) > limit:
            raise RequestError(
                f"tokens must hold at most {limit} token ids ({MAX_CONTEXTS} x max_model_len), got {len(body.tokens)}: "
                "convert them in several calls",
                "tokens",
            )
        if max(body.tokens, default=0) >= vocab_size:
            raise RequestError(f"tokens holds an id outside 0..{vocab_size - 1}", "tokens")
        text = self._engine.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return DetokenizeResponse(prompt=text).model_dump_json().encode()
