"""Answers that have to be tool calls, or whose calls have to be right: what constrains them, and what reads them."""

from __future__ import annotations

import json
from typing import Any

from chairlift.server.api.protocol.tools import FunctionTool
from chairlift.server.tools.call_formats import CallFormat
from chairlift.structured_outputs import StructuredOutputs

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def arguments_constraint(tool: FunctionTool) -> StructuredOutputs:
    """The answer is the arguments of this tool."""
    return StructuredOutputs(json=tool.function.parameters or ANY_OBJECT)


def calls_constraint(tools: list[FunctionTool], is_parallel: bool) -> StructuredOutputs:
    """The answer is a list of calls, at least one. A schema's own references keep their meaning: each schema stands
    whole under `$defs`, and what pointed to its root points there."""
    definitions: dict[str, Any] = {}
    items: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        root = f"#/$defs/tool{index}"
        definitions[f"tool{index}"] = _moved(tool.function.parameters or ANY_OBJECT, root)
        properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": root}}
        items.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = {} if is_parallel else {"maxItems": 1}
    schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": items}, "$defs": definitions}
    return StructuredOutputs(json=schema)


def lazy_calls_constraint(tools: list[FunctionTool], form: CallFormat, is_parallel: bool) -> StructuredOutputs:
    """The answer is any text, but what follows an opening of the format is a call that is right (llguidance's lazy
    lexemes). `form` has one opening, which is text, and a closing."""
    (opening,) = form.openings
    closing = json.dumps(f"\n{form.closing}")
    calls = " | ".join(f"call{index}" for index in range(len(tools)))
    rules = [
        f"start: (opening call){'*' if is_parallel else '?'} TEXT",
        f"opening[lazy]: TEXT {json.dumps(opening)}",
        "TEXT: /(.|\\n)*/",
        f'call: "\\n" ({calls}) {closing}',
    ]
    for index, tool in enumerate(tools):
        before = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ')
        rules.append(f'call{index}: {before} %json {json.dumps(tool.function.parameters or ANY_OBJECT)} "}}"')
    return StructuredOutputs(grammar="\n".join(rules))


def _moved(schema: Any, root: str) -> Any:
    """The schema with every reference into itself led to where it stands now."""
    if isinstance(schema, list):
        return [_moved(entry, root) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }
