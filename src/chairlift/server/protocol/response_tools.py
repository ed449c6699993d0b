"""The tools of /v1/responses, and the functions of a chat as which the model sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from chairlift.errors import RequestError
from chairlift.server.protocol.base import MAX_TOOLS, ReceivedObject, RequestBody, field_of
from chairlift.server.protocol.tools import ToolName

MAX_NAME_LENGTH: Final = 128
CUSTOM_ARGUMENT: Final = "input"
"""The argument of the function as which the model sees a custom tool."""

HOSTED_TYPE: Final = re.compile(
    r"(apply_patch|code_interpreter|computer|file_search|image_generation|local_shell|mcp|programmatic_tool_calling"
    r"|shell|tool_search|web_search)(_[a-z0-9_]+)?"
)
"""The types of tools that OpenAI executes, or whose calls have a special form. The end is a version."""


def _hosted_type(others: str) -> AfterValidator:
    """Accepts types of hosted tools. others: the other types of the same field, for the message."""

    def check(kind: str) -> str:
        if HOSTED_TYPE.fullmatch(kind) is None:
            expected = f"{others} or a hosted tool such as 'web_search'"
            raise PydanticCustomError("literal_error", "must be a known type", {"expected": expected})
        return kind

    return AfterValidator(check)


class ClientTool(RequestBody):
    """The base of tools that the client executes."""

    name: ToolName
    description: str | None = None
    defer_loading: bool | None = Field(None, description="Has no effect: all tools are part of the prompt.")
    allowed_callers: list[str] | None = Field(None, description="Has no effect: only the model calls tools.")
    is_async: bool | None = Field(None, alias="async", description="Has no effect.")


class ResponsesFunction(ClientTool):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = Field(None, description="Has no effect.")

    def function_fields(self) -> dict[str, Any]:
        """The fields of the function of a chat, except the name."""
        return self.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)


class CustomFormat(RequestBody):
    """The form of the input of a custom tool. A grammar becomes part of the description, and is not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(ClientTool):
    """A tool whose input is text."""

    type: Literal["custom"]
    format: CustomFormat | None = None

    def function_fields(self) -> dict[str, Any]:
        """The fields of a function whose only argument is the input."""
        parts = [self.description]
        if self.format is not None and self.format.definition:
            parts.append(f"`{CUSTOM_ARGUMENT}` follows this {self.format.syntax} grammar:\n{self.format.definition}")
        properties = {CUSTOM_ARGUMENT: {"type": "string"}}
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        return {"description": "\n\n".join(filter(None, parts)) or None, "parameters": schema}


class ResponsesHostedTool(ReceivedObject):
    type: Annotated[str, _hosted_type("'function', 'custom', 'namespace'")]


class NamespaceTool(RequestBody):
    """A group of tools, such as the tools of an MCP server."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[Annotated[ResponsesFunction | CustomTool, Field(discriminator="type")]] = Field(max_length=MAX_TOOLS)


def _tool_form(tool: Any) -> str:
    kind = field_of(tool, "type")
    return kind if kind in ("function", "custom", "namespace") else "hosted"


ResponsesTool = Annotated[
    Annotated[ResponsesFunction, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[ResponsesHostedTool, Tag("hosted")],
    Discriminator(_tool_form),
]
ResponsesTools = Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)]


class ResponsesNamedTool(RequestBody):
    """A tool, or a namespace with all of its tools."""

    type: Literal["function", "custom", "namespace"]
    name: ToolName
    namespace: str | None = None


def _choice_form(choice: Any) -> str:
    kind = field_of(choice, "type")
    if kind in ("function", "custom", "namespace"):
        return "named"
    return "allowed" if kind == "allowed_tools" else "hosted"


NamedForm = Annotated[ResponsesNamedTool, Tag("named")]
HostedForm = Annotated[ResponsesHostedTool, Tag("hosted")]
ChosenTools = list[Annotated[NamedForm | HostedForm, Discriminator(_choice_form)]]


class ResponsesHostedChoice(ReceivedObject):
    type: Annotated[str, _hosted_type("'function', 'custom', 'namespace', 'allowed_tools'")]


class ResponsesAllowedTools(RequestBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[ChosenTools, Field(min_length=1, max_length=MAX_TOOLS)]


ResponsesToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        NamedForm | Annotated[ResponsesAllowedTools, Tag("allowed")] | Annotated[ResponsesHostedChoice, Tag("hosted")],
        Discriminator(_choice_form),
    ]
)


@dataclass(frozen=True, slots=True)
class CalledTool:
    name: str
    namespace: str | None = None
    is_custom: bool = False


class OfferedTools:
    """The functions that the model is offered, with their tools by name: one for each tool that the client executes.

    The function of a tool in a namespace is named `NAMESPACE__NAME`, with a number if another function has this name.
    `ignored` are the parts without an effect. `later` are tools that items declare, of which known ones are skipped.
    Raises RequestError if there are more than MAX_TOOLS.
    """

    def __init__(self, tools: Sequence[ResponsesTool], later: Sequence[ResponsesTool] = ()) -> None:
        self.functions: list[dict[str, Any]] = []
        self.called: dict[str, CalledTool] = {}
        self.ignored: set[str] = set()
        self._names: dict[tuple[str | None, str], str] = {}
        self._taken = {tool.name for tool in (*tools, *later) if isinstance(tool, ClientTool)}
        for namespace, tool in self._members(tools):
            self._offer(namespace, tool)
        for namespace, tool in self._members(later):
            if (namespace, tool.name) not in self._names:
                self._offer(namespace, tool)

    def _members(self, tools: Sequence[ResponsesTool]) -> Iterator[tuple[str | None, ResponsesFunction | CustomTool]]:
        """The tools that the client executes, with their namespaces."""
        for tool in tools:
            if isinstance(tool, ResponsesHostedTool):
                self.ignored.add(HOSTED_TYPE.sub(r"tools.\1", tool.type))
            elif isinstance(tool, NamespaceTool):
                yield from ((tool.name, member) for member in tool.tools)
            else:
                yield None, tool

    def _offer(self, namespace: str | None, tool: ResponsesFunction | CustomTool) -> None:
        if len(self.functions) == MAX_TOOLS:
            message = f"tools: at most {MAX_TOOLS} tools are allowed, including those of namespaces: declare fewer"
            raise RequestError(message, "tools")
        name = tool.name
        if namespace is not None:  # A tool that is declared twice has the same name twice, which is rejected.
            name = self._names.get((namespace, name)) or self._unused_name(_flat_name(name, namespace))
        self._names[namespace, tool.name] = name
        self.called[name] = CalledTool(tool.name, namespace, isinstance(tool, CustomTool))
        self.functions.append({"type": "function", "function": {"name": name, **tool.function_fields()}})
        if isinstance(tool, CustomTool) and tool.format is not None and tool.format.type == "grammar":
            self.ignored.add("tools.format")
        without_effect = {name: getattr(tool, name, None) for name in ("defer_loading", "output_schema", "is_async")}
        self.ignored |= {f"tools.{name.removeprefix('is_')}" for name, value in without_effect.items() if value}

    def _unused_name(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._taken:
            number += 1
            name = f"{wanted[: MAX_NAME_LENGTH - 4]}_{number}"
        self._taken.add(name)
        return name

    def function_name(self, name: str, namespace: str | None) -> str:
        """The name of the function of a tool, which need not be declared."""
        return self._names.get((namespace, name)) or (name if namespace is None else _flat_name(name, namespace))

    def choice(self, choice: ResponsesToolChoice | None) -> Any:
        """The corresponding `tool_choice` of a chat. It is `none` if only tools that are not offered may be called."""
        is_possible = choice != "required" or self.functions or not self.ignored
        if is_possible and (choice is None or isinstance(choice, str)):
            return choice
        given: Sequence[Any] = choice.tools if isinstance(choice, ResponsesAllowedTools) else [choice]
        named = [{"type": "function", "function": {"name": name}} for tool in given for name in self._chosen(tool)]
        if not named:
            self.ignored.add("tool_choice")
            return "none"
        mode = choice.mode if isinstance(choice, ResponsesAllowedTools) else "required"
        if isinstance(choice, ResponsesAllowedTools) or len(named) > 1:  # A namespace has several tools.
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        return named[0]

    def _chosen(self, tool: object) -> list[str]:
        """The functions of a tool in `tool_choice`; none for a hosted tool."""
        if not isinstance(tool, ResponsesNamedTool):
            return []
        if tool.type == "namespace":
            return [name for name, called in self.called.items() if called.namespace == tool.name]
        return [self.function_name(tool.name, tool.namespace)]


def _flat_name(name: str, namespace: str) -> str:
    """The name of a function for a tool in a namespace, as Codex writes it."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"[:MAX_NAME_LENGTH]
