"""The endpoints /tokenize and /detokenize of vLLM, and their bodies."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, Field

from chairlift.errors import RequestError
from chairlift.server.api.endpoint import endpoint
from chairlift.server.api.logprobs import token_text
from chairlift.server.preparation.conversation import ModelPlanner
from chairlift.server.protocol.base import MAX_MESSAGES, MAX_TOOLS, RequestBody
from chairlift.server.protocol.chat import ChatCompletionRequest, ChatMessage
from chairlift.server.protocol.tools import FunctionTool

MAX_CONTEXTS: Final = 8  # of `max_model_len` token ids, in one call to /detokenize

CHAT_ONLY_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")


class TokenizeRequest(RequestBody):
    """The body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    return_token_strs: bool | None = None
    # -- only with messages --
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, description="Rejected: the server is started with a template.")
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None

    def chat(self) -> ChatCompletionRequest | None:
        """The messages as a chat request, or None for a prompt; raises RequestError."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt or messages", "prompt")
        given = {name: value for name in CHAT_ONLY_FIELDS if (value := getattr(self, name)) is not None}
        if self.messages is None:
            if given:
                name = next(iter(given))
                raise RequestError(f"{name} is only allowed with messages: leave it out", name)
            return None
        return ChatCompletionRequest(messages=self.messages, add_special_tokens=self.add_special_tokens, **given)


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class DetokenizeResponse(BaseModel):
    prompt: str


@endpoint("/tokenize", TokenizeResponse)
def tokenize_text(planner: ModelPlanner, body: TokenizeRequest) -> bytes:
    """Convert a prompt or messages to token ids (vLLM)."""
    engine = planner.engine
    if (chat := body.chat()) is not None:
        tokens = planner.prompt_token_ids(chat)
    else:
        adds_special = body.add_special_tokens is not False
        tokens = engine.input_processor.encode_text(body.prompt or "", "prompt", add_special_tokens=adds_special)
    token_bytes = engine.tokenizer.token_bytes
    texts = [token_text(token_bytes(token)) for token in tokens] if body.return_token_strs else None
    most = engine.facts.scheduler_config.max_model_len
    response = TokenizeResponse(count=len(tokens), max_model_len=most, tokens=tokens, token_strs=texts)
    return response.model_dump_json(exclude_none=True).encode()


@endpoint("/detokenize", DetokenizeResponse)
def detokenize_ids(planner: ModelPlanner, body: DetokenizeRequest) -> bytes:
    """Convert token ids to text (vLLM)."""
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
