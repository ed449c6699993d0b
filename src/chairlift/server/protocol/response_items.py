"""The items of the input of /v1/responses, and the messages of a chat that correspond to them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from chairlift.server.protocol.base import MAX_CONTENT_PARTS, ReceivedObject, RequestBody, field_of
from chairlift.server.protocol.chat import keys_with_values
from chairlift.server.protocol.response_tools import CUSTOM_ARGUMENT, OfferedTools, ResponsesTools

CLIENT_ITEM: Final = re.compile(r"(apply_patch|local_shell|shell|tool_search)_(call|call_output|output)")
"""The types of calls with a special form, and of their results, which the client computes."""

SERVER_ITEM: Final = re.compile(
    r"(code_interpreter|computer|file_search|image_generation|mcp|web_search)_call(_output)?|program(_output)?"
    r"|mcp_(list_tools|approval_request|approval_response)|(context_)?compaction(_summary)?|ghost_snapshot"
)
"""The types of items without text that the model could read. They are skipped."""

RETURNED_FIELDS: Final = {"id", "status", "phase", "caller", "created_by", "async", "type", "role"}
"""Fields of OpenAI's items that have no effect on later answers."""

ReturnedValue = Annotated[Any, Field(description="Part of a received item; has no effect.")]


class InputPart(RequestBody):
    type: Literal["input_text", "output_text", "refusal", "reasoning_text", "summary_text", "text"]
    text: str = ""
    refusal: str = ""
    annotations: ReturnedValue = None
    logprobs: ReturnedValue = None
    prompt_cache_breakpoint: Annotated[Any, Field(description="Has no effect: every prefix is cached.")] = None


InputParts = Annotated[list[InputPart], Field(max_length=MAX_CONTENT_PARTS)]


def _text(content: str | list[InputPart] | None) -> str:
    texts = (content,) if isinstance(content, str) else (part.text or part.refusal for part in content or [])
    return "\n".join(filter(None, texts))


class InputMessage(RequestBody):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | InputParts | None
    id: ReturnedValue = None
    status: ReturnedValue = None


class InputAnswer(InputMessage, ReceivedObject):
    """A message of the assistant."""


class InputFunctionCall(ReceivedObject):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class InputCustomCall(ReceivedObject):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    @property
    def arguments(self) -> str:
        """The arguments of the function as which the model sees the tool."""
        return json.dumps({CUSTOM_ARGUMENT: self.input}, ensure_ascii=False)


class InputCallOutput(RequestBody):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | InputParts
    id: ReturnedValue = None
    status: ReturnedValue = None
    name: ReturnedValue = None
    namespace: ReturnedValue = None
    caller: ReturnedValue = None
    created_by: ReturnedValue = None


class InputReasoning(ReceivedObject):
    type: Literal["reasoning"]
    summary: Annotated[InputParts, Field(default_factory=list)]
    content: InputParts | None = None
    encrypted_content: str | None = Field(None, description="Has no effect: only OpenAI can decrypt it.")


class ItemReference(RequestBody):
    type: Literal["item_reference"] = "item_reference"
    id: str


class SkippedItem(ReceivedObject):
    """An item of `SERVER_ITEM`."""

    type: str


class OtherItem(ReceivedObject):
    """A call of a tool that is not a function, or its result, or a declaration of tools within the conversation."""

    type: str
    id: str | None = None
    call_id: str | None = None
    tools: ResponsesTools | None = Field(None, description="These are offered as if the request had declared them.")

    @property
    def payload(self) -> str:
        """The arguments of a call, or the result of one, as text."""
        extra, names = self.model_extra or {}, ("output", "action", "operation", "arguments")
        value = next((extra[name] for name in names if name in extra), extra)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _item_form(item: Any) -> str:
    """The alternative for an input item. An item without a type is a message, or a reference if it has no role."""
    kind = field_of(item, "type")
    if not isinstance(kind, str):
        return "item_reference" if field_of(item, "id") is not None and field_of(item, "role") is None else "message"
    if SERVER_ITEM.fullmatch(kind):
        return "web_search_call"
    if CLIENT_ITEM.fullmatch(kind):
        return "additional_tools"
    return "function_call_output" if kind == "custom_tool_call_output" else kind


Message = Annotated[
    Annotated[InputMessage, Tag("prompt")] | Annotated[InputAnswer, Tag("answer")],
    Discriminator(lambda item: "answer" if field_of(item, "role") == "assistant" else "prompt"),
]
InputItem = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[InputFunctionCall, Tag("function_call")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[SkippedItem, Tag("web_search_call")]
    | Annotated[OtherItem, Tag("additional_tools")],
    Discriminator(_item_form),
]


ITEM: Final = TypeAdapter[Any](InputItem)
ITEMS: Final = TypeAdapter[list[Any]](list[InputItem])


class ConvertedInput:
    """The messages of a chat for input items, where the reasoning, content and calls of an answer are one message."""

    def __init__(self, items: Sequence[InputItem], tools: OfferedTools) -> None:
        self.messages: list[dict[str, Any]] = []
        self.ignored: set[str] = set()
        self._tools = tools
        for item in items:
            self._add(item)
        for message in self.messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])

    def _add(self, item: InputItem) -> None:
        if isinstance(item, ReceivedObject) and not isinstance(item, OtherItem | SkippedItem):
            extra = item.model_extra or {}
            self.ignored |= {f"input.{name}" for name in keys_with_values(extra) if name not in RETURNED_FIELDS}
        if isinstance(item, InputAnswer):
            self._answer("content")["content"] = _text(item.content)
        elif isinstance(item, InputMessage):
            self.messages.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, InputReasoning):
            self._add_reasoning(item)
        elif isinstance(item, InputFunctionCall | InputCustomCall):
            self._add_call(item.call_id, self._tools.function_name(item.name, item.namespace), item.arguments)
        elif isinstance(item, InputCallOutput):
            self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, SkippedItem):
            self.ignored.add(f"input.{item.type}")
        elif isinstance(item, OtherItem):
            self._add_other(item)
        else:  # Reasoning, which a later answer does not need.
            self.ignored.add("input.item_reference")

    def _answer(self, *lacking: str) -> dict[str, Any]:
        """The last message if it is an answer that lacks these parts, otherwise a new answer."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in lacking):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def _add_reasoning(self, item: InputReasoning) -> None:
        if item.encrypted_content:
            self.ignored.add("input.encrypted_content")
        if text := _text(item.content or item.summary):
            self._answer("content", "tool_calls").setdefault("reasoning_content", []).append(text)

    def _add_call(self, call_id: str, name: str, arguments: str) -> None:
        call = {"id": call_id, "function": {"name": name, "arguments": arguments}}
        self._answer().setdefault("tool_calls", []).append(call)

    def _add_other(self, item: OtherItem) -> None:
        found, call_id = CLIENT_ITEM.fullmatch(item.type), item.call_id or item.id or ""
        if found is None:  # A declaration of tools.
            return
        if found[2] == "call":
            self._add_call(call_id, found[1], item.payload)
        else:
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": item.payload})
