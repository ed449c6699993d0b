"""The request and response bodies of /tokenize and /detokenize, which are those of vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from chairlift.errors import RequestError
from chairlift.server.protocol.base import MAX_MESSAGES, MAX_TOOLS, RequestBody
from chairlift.server.protocol.chat import ChatCompletionRequest, ChatMessage
from chairlift.server.protocol.tools import FunctionTool

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
