"""Random JSON schemas whose values are not too long, of what llguidance supports."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORDS = ["name", "age", "id", "tags", "ok", "x y", "größe", "a\"b", "$ref", "p1", "p2", "p3"]  # fmt: skip
PATTERNS = ["^[a-z]{1,6}$", r"^\d{2,4}-\d{2}$", "^(red|green|blue)$", "^[A-Z][a-z]*[0-9]$", "b+", r"^\w{1,5}\s\w$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]


def random_schema(seed: int) -> Schema:
    """Always the same one for a seed; an object or an array at the top."""
    rng = random.Random(seed)
    schema = rng.choice([_object, _object, _array])(rng, 3)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": {"leaf": _leaf(rng, 0)}, **schema}


def _any(rng: random.Random, depth: int) -> Schema:
    if depth <= 0 or rng.random() < 0.45:
        return _leaf(rng, depth)
    makers: list[Callable[[random.Random, int], Schema]] = [_object, _object, _array, _tuple, _union, _reference]
    return rng.choice(makers)(rng, depth)


def _leaf(rng: random.Random, _depth: int) -> Schema:
    return rng.choice([_integer, _number, _string, _string, _pattern, _format, _enum, _const, _simple])(rng)


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-500, 500)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}
    if rng.random() < 0.2:
        schema = {"type": "integer", "multipleOf": rng.choice([2, 3, 5, 7]), "minimum": 0, "maximum": 10_000}
    elif rng.random() < 0.2:
        schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 10}
    return schema


def _number(rng: random.Random) -> Schema:
    low = rng.choice([-10.5, 0, 0.25, 3])
    return {"type": "number", "minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): low + rng.choice([1, 20.5])}


def _string(rng: random.Random) -> Schema:
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12}


def _format(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample(["a", "B c", "ü", 1, -2.5, True, None, [1, 2], {"k": "v"}], rng.randint(1, 4))}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice(["fixed", 0, False, None, {"a": [1]}])}


def _simple(rng: random.Random) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "title": "annotations constrain nothing",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        schema |= {"required": names, "additionalProperties": {"type": "boolean"}, "maxProperties": len(names) + 1}
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _reference(rng: random.Random, depth: int) -> Schema:
    return {"$ref": "#/$defs/leaf"}
