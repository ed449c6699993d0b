"""The tools that a request declares, and the tool calls of an answer."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_core import from_json

from chairlift.errors import RequestError
from chairlift.loading.text.written_object import WrittenObject
from chairlift.server.protocol.base import MAX_TOOLS, MAX_TOOLS_BYTES, CacheableObject, ReceivedObject, RequestBody

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class FunctionDefinition(CacheableObject):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of the arguments. Default: no arguments."
    )
    strict: bool | None = Field(None, description="true: the arguments follow the schema also with tool_choice `auto`.")

    def for_template(self) -> dict[str, Any]:
        """The definition as chat templates expect it."""
        return self.model_dump(exclude={"strict", "cache_control"}, exclude_none=True)


class FunctionTool(CacheableObject):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestBody):
    name: ToolName


class NamedTool(RequestBody):
    """A `tool_choice` that requires a call of one tool."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(RequestBody):
    """A `tool_choice` that permits or requires a call of one of several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
)


class FunctionCallParam(ReceivedObject):
    name: str
    arguments: str | None = None


class ToolCallParam(ReceivedObject):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallParam
    index: int | None = Field(None, description="Index of a streamed call; has no effect.")

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it, with the arguments as an object."""
        function = {"name": self.function.name, "arguments": parse_arguments(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def parse_arguments(text: str | None) -> dict[str, Any]:
    """The arguments of a tool call as an object, with their text.

    Text that is not a JSON object, for example because the token limit has cut the call, becomes the value of
    `INVALID_JSON`, as at Anthropic.
    """
    try:
        value = from_json((text or "").strip() or "{}", allow_inf_nan=False)
    except ValueError:
        value = None
    return WrittenObject(value, (text or "").strip() or "{}") if isinstance(value, dict) else {"INVALID_JSON": text}


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


def check_tools(tools: list[FunctionTool]) -> None:
    """Raise RequestError if two tools have the same name, or their definitions have more than MAX_TOOLS_BYTES."""
    counts = Counter(tool.function.name for tool in tools)
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        message = f"tools: names must be unique, but {', '.join(repeated):.200} occurs more than once"
        raise RequestError(message, "tools")
    num_bytes = sum(len(json.dumps(tool.function.for_template())) for tool in tools)
    if num_bytes > MAX_TOOLS_BYTES:
        raise RequestError(
            f"tools: the definitions of the {len(tools)} tools have {num_bytes} bytes as JSON, but at most "
            f"{MAX_TOOLS_BYTES} are allowed: shorten descriptions and schemas, or declare fewer tools",
            "tools",
        )


def selected_tools(tools: list[FunctionTool], choice: ToolChoice | None) -> tuple[list[FunctionTool], str]:
    """The tools that the model may call, and the mode: `none`, `auto`, `required` or `named`; raises RequestError if
    the choice requires a tool that is not declared."""
    check_tools(tools)
    if isinstance(choice, NamedTool):
        return _named(tools, [choice.function.name]), "named"
    if isinstance(choice, AllowedToolsChoice):
        return _named(tools, [tool.function.name for tool in choice.allowed_tools.tools]), choice.allowed_tools.mode
    if choice == "required" and not tools:
        message = "tool_choice must not be 'required' without tools: declare at least one tool"
        raise RequestError(message, "tool_choice")
    return (tools, choice or "auto") if tools and choice != "none" else ([], "none")


def _named(tools: list[FunctionTool], names: list[str]) -> list[FunctionTool]:
    known = {tool.function.name: tool for tool in tools}
    if missing := [name for name in names if name not in known]:
        raise RequestError(f"tool_choice must name one of tools, got {missing[0]!r}", "tool_choice")
    return [known[name] for name in names]
