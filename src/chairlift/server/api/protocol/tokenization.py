"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from chairlift.errors import RequestError
from chairlift.server.api.protocol.base import RequestBody
from chairlift.server.api.protocol.chat import ChatCompletionRequest, ChatMessage
from chairlift.server.api.protocol.item_limits import MAX_MESSAGES, MAX_TOOLS
from chairlift.server.api.protocol.tools import FunctionTool

CHAT_ONLY = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


class TokenizeRequest(RequestBody):
    """A prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = Field(None, description="true for a prompt, false for messages, if not given.")
    return_token_strs: bool | None = None
    # -- of messages --
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None

    def chat(self) -> ChatCompletionRequest | None:
        """The conversation, if it is one; raises RequestError."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("exactly one of prompt and messages must be given", "prompt")
        given = {name: value for name in CHAT_ONLY if (value := getattr(self, name)) is not None}
        if self.messages is None:
            if given:
                name = next(iter(given))
                raise RequestError(f"{name} is for messages, and this is a prompt: leave it out", name)
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
