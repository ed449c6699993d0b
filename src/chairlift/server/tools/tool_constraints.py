"""Constraints on the output that make an answer consist of tool calls, or its calls follow their schemas."""

from __future__ import annotations

import json
from typing import Any

from chairlift.server.protocol.tools import FunctionTool
from chairlift.server.tools.answer_formats import CallFormat
from chairlift.structured_outputs import StructuredOutputs

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def arguments_constraint(tool: FunctionTool) -> StructuredOutputs:
    """Constrains the answer to the arguments of this tool."""
    return StructuredOutputs(json=tool.function.parameters or ANY_OBJECT)


def calls_constraint(tools: list[FunctionTool], is_parallel: bool) -> StructuredOutputs:
    """Constrains the answer to a JSON list of at least one call of these tools.

    The schema of each tool becomes an entry of `$defs`, and its references to itself are changed accordingly.

    Args:
        is_parallel: permits more than one call.
    """
    definitions: dict[str, Any] = {}
    items: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        root = f"#/$defs/tool{index}"
        definitions[f"tool{index}"] = _rebase_references(tool.function.parameters or ANY_OBJECT, root)
        properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": root}}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        items.append(call)
    maximum = {} if is_parallel else {"maxItems": 1}
    schema = {"type": "array", "minItems": 1, **maximum, "items": {"anyOf": items}, "$defs": definitions}
    return StructuredOutputs(json=schema)


def lazy_calls_constraint(tools: list[FunctionTool], form: CallFormat, is_parallel: bool) -> StructuredOutputs:
    """Permits any text, but constrains what follows an opening of the format to a valid call of these tools.

    The grammar uses the lazy lexemes of llguidance.

    Args:
        form: a format with a closing and one opening, both of which are encoded as plain text.
        is_parallel: permits more than one call.
    """
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


def _rebase_references(schema: Any, root: str) -> Any:
    """The schema with `root` in front of every reference into itself."""
    if isinstance(schema, list):
        return [_rebase_references(entry, root) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _rebase_references(value, root)
        for key, value in schema.items()
    }
