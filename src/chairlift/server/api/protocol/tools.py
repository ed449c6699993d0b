"""Tools as a request declares them, and the calls that come back."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from chairlift.errors import RequestError
from chairlift.server.api.protocol.base import RequestBody
from chairlift.server.api.protocol.item_limits import MAX_TOOLS, MAX_TOOLS_BYTES

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class FunctionDefinition(RequestBody):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; none is an object without limits.")
    strict: bool | None = Field(None, description="Arguments follow the schema also where the model chooses to call.")

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return self.model_dump(exclude={"strict"}, exclude_none=True)


class FunctionTool(RequestBody):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestBody):
    name: ToolName


class NamedTool(RequestBody):
    """`tool_choice`: this one is called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(RequestBody):
    """`tool_choice`: one of these may be, or is, called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


class FunctionCallParam(RequestBody):
    name: str
    arguments: str


class ToolCallParam(RequestBody):
    """A call that an earlier answer held."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallParam
    index: int | None = Field(None, description="Of a streamed call that is sent back as it came.")


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


def check_tools(tools: list[FunctionTool]) -> None:
    """Raises RequestError if two tools have the same name, or their definitions are larger than MAX_TOOLS_BYTES."""
    counts = Counter(tool.function.name for tool in tools)
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise RequestError(f"tools: {', '.join(repeated):.200} is declared more than once", "tools")
    num_bytes = sum(len(json.dumps(tool.function.for_template())) for tool in tools)
    if num_bytes > MAX_TOOLS_BYTES:
        raise RequestError(
            f"tools: the definitions of the {len(tools)} tools have {num_bytes} bytes as JSON, but at most "
            f"{MAX_TOOLS_BYTES} are allowed: shorten descriptions and schemas, or declare fewer tools",
            "tools",
        )


def select_tools(tools: list[FunctionTool], choice: ToolChoice | None) -> tuple[list[FunctionTool], str]:
    """The tools that the model may see, and the mode: `none`, `auto`, `required` or `named`.

    Raises:
        RequestError: a choice without tools, or of one that is not among them.
    """
    check_tools(tools)
    if isinstance(choice, NamedTool):
        return _named(tools, [choice.function.name]), "named"
    if isinstance(choice, AllowedToolsChoice):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        mode = choice.allowed_tools.mode
        return _named(tools, allowed), mode
    if not tools:
        if choice == "required":
            raise RequestError("tool_choice required needs tools", "tool_choice")
        return [], "none"
    if choice == "none":
        return [], "none"
    return tools, choice or "auto"


def _named(tools: list[FunctionTool], names: list[str]) -> list[FunctionTool]:
    known = {tool.function.name: tool for tool in tools}
    if missing := [name for name in names if name not in known]:
        raise RequestError(f"tool_choice names {missing[0]!r}, which is not among tools", "tool_choice")
    return [known[name] for name in names]
