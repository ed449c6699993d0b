"""Random schemas of tools as clients send them: with references, identifiers, and keywords that no grammar follows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from support.random_schemas import Schema, random_schema

AWKWARD: list[Schema] = [
    {"type": "string", "format": "url"},
    {"type": "string", "format": "binary"},
    {"type": "string", "format": "hostname", "maxLength": 20},
    {"type": "string", "format": "ipv6"},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 4},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False, "maxItems": 3},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "null"}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "dependentRequired": {"a": ["b"]}, "maxProperties": 2},
    {"type": "string", "pattern": "^(?=a)[ab]{1,3}$"},
    {"type": "string", "pattern": r"^(a|b)\1$", "maxLength": 4},
    {"type": "string", "pattern": r"\bword\b", "maxLength": 8},
    {"not": {"type": "string"}, "type": ["string", "boolean"], "maxLength": 4},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "number", "minimum": 5, "maximum": 20}]},
    {"type": "integer", "format": "int32"},
    {"type": "integer", "format": "int64"},
    {"type": "integer", "format": "uint8"},
    {"type": "number", "format": "double", "minimum": 0, "maximum": 1},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "integer", "minimum": -(1 << 64), "maximum": 5},
    {"enum": [{"$ref": "#/a/b"}, {"$id": "x", "format": "url", "uniqueItems": True}]},
    {"const": {"$ref": "#/$defs/none", "title": "kept"}},
    {"type": "boolean", "default": {"$ref": "#/nowhere"}, "examples": [{"$ref": 1}]},
    {"$ref": "#/$defs/missing"},
    {"$ref": "https://example.org/unknown.json"},
    {"$ref": "#/$defs/a~1b"},
    {"$ref": "#marked"},
    {"$ref": "part.json"},
    {"if": {"const": 1}, "then": {"const": 2}, "enum": [1, 3]},
    {"type": "array", "contains": {"const": 1}, "items": {"enum": [1, 2]}, "maxItems": 3},
    {"type": "string", "nullable": True, "maxLength": 3},
    {"type": "any", "enum": ["x"]},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "minProperties": 1},
    {"type": "object", "properties": {"a": True}, "unevaluatedProperties": False, "maxProperties": 1},
]
DEFINITIONS: Schema = {
    "a/b": {"type": "integer", "minimum": 0, "maximum": 9},
    "m": {"$anchor": "marked", "type": "string", "maxLength": 4},
    "p": {"$id": "part.json", "$ref": "#/$defs/inner", "$defs": {"inner": {"type": "boolean"}}},
}
ROOTS: list[Callable[[], Schema]] = [
    dict,
    lambda: {"$id": "https://example.org/tool.json"},
    lambda: {"$schema": "https://json-schema.org/draft/2020-12/schema", "description": "A tool"},
    lambda: {"$schema": "unknown", "title": "A tool"},
]


def random_tool_schema(seed: int) -> Schema:
    """The schema of the arguments of a tool; always the same one for a seed."""
    rng = random.Random(seed)
    inner = random_schema(seed)
    properties: dict[str, Any] = {f"p{index}": rng.choice(AWKWARD) for index in range(rng.randint(1, 3))}
    properties["inner"] = {key: value for key, value in inner.items() if key not in ("$schema", "$defs")}
    names = list(properties)
    return {
        **rng.choice(ROOTS)(),
        "type": "object",
        "properties": properties,
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
        "$defs": {**DEFINITIONS, **inner["$defs"]},
    }
