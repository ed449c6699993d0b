"""Random JSON schemas with integers that a double does not hold, nested in what such schemas consist of."""

from __future__ import annotations

import random
from collections.abc import Callable

from support.random_schemas import Schema

INT64 = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
UINT64 = {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}
LARGEST = 1 << 62


def random_integer_schema(seed: int) -> Schema:
    """Always the same one for a seed."""
    rng = random.Random(seed)
    definitions = {name: _leaf(rng) for name in ("number", "other")}
    node = {
        "type": "object",
        "properties": {"value": _leaf(rng), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["value"],
        "additionalProperties": False,
    }
    return {**_any(rng, 3), "$defs": {**definitions, "node": node}}


def _any(rng: random.Random, depth: int) -> Schema:
    if depth <= 0 or rng.random() < 0.3:
        return _leaf(rng)
    makers: list[Callable[[random.Random, int], Schema]] = [_object, _object, _array, _tuple, _union, _all, _reference]
    return rng.choice(makers)(rng, depth - 1)


def _number(rng: random.Random) -> int:
    near = rng.choice([1 << 53, 1 << 62, 10**18, 1 << 63, 1 << 64]) + rng.randint(-3, 3)
    return rng.choice([-1, 1]) * rng.choice([rng.randint(0, LARGEST), min(near, LARGEST)])


def _leaf(rng: random.Random) -> Schema:
    return rng.choice([_const, _enum, _enum, _range, _range, _reals, _multiple, _full, _plain])(rng)


def _const(rng: random.Random) -> Schema:
    number = _number(rng)
    return {"const": rng.choice([number, [number, "a"], {"k": number, "ü": [None]}])}


def _enum(rng: random.Random) -> Schema:
    values = [*(_number(rng) for _ in range(rng.randint(1, 4))), *rng.sample(["a", None, True, 1.5, 7, [1]], 2)]
    bounds = {"minimum": _number(rng)} if rng.random() < 0.2 else {}
    return {"enum": [*values, [_number(rng)], "x"], **bounds}


def _range(rng: random.Random) -> Schema:
    low, high = sorted([_number(rng), _number(rng)])
    names = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")])
    bounds = dict(zip(names, (low - 1, high + 1), strict=True))
    if rng.random() < 0.4:
        bounds.pop(rng.choice(names))
    return {"type": rng.choice(["integer", "integer", ["integer", "null"]]), **bounds}


def _reals(rng: random.Random) -> Schema:
    low, high = sorted([_number(rng), _number(rng)])
    return {"type": "number", "minimum": rng.choice([low, -0.5]), "exclusiveMaximum": max(high, 1) + 1}


def _multiple(rng: random.Random) -> Schema:
    step = (1 << 53) + rng.randint(1, 9)
    return {"type": "integer", "multipleOf": step, "minimum": -3 * step, "maximum": 9 * step + 1}


def _full(rng: random.Random) -> Schema:
    return dict(rng.choice([INT64, UINT64]))


def _plain(rng: random.Random) -> Schema:
    return dict(rng.choice([{"type": "boolean"}, {"type": "string", "maxLength": 4}, {"enum": ["a", 1]}]))


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "größe", 'a"b', "x y", "$ref", "p1"], rng.randint(1, 4))
    return {
        "type": "object",
        "title": "annotations constrain nothing",
        "properties": {name: _any(rng, depth) for name in names},
        "required": rng.sample([*names, "more"], rng.randint(0, len(names))),
        "additionalProperties": rng.choice([False, _leaf(rng)]) if "more" not in names else False,
    } | ({"required": names} if rng.random() < 0.5 else {})


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [_any(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": rng.randint(0, len(items))}


def _union(rng: random.Random, depth: int) -> Schema:
    options = [_any(rng, depth) for _ in range(rng.randint(2, 3))]
    return {rng.choice(["anyOf", "anyOf", "oneOf"]): options}


def _all(rng: random.Random, _depth: int) -> Schema:
    low, high = sorted([_number(rng), _number(rng)])
    return {"allOf": [{"type": "integer"}, {"minimum": low}, {"maximum": high}]}


def _reference(rng: random.Random, _depth: int) -> Schema:
    return {"$ref": f"#/$defs/{rng.choice(['number', 'other', 'node'])}"}
