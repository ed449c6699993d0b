"""The intersection of two JSON schemas as one schema."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from chairlift.grammar.followed_schema import ANNOTATIONS, declared_types

NUMERIC: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
CLOSEST: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}


RELATED: Final = {
    "patternProperties": ("properties", "additionalProperties", "patternProperties"),
    "additionalItems": ("items", "prefixItems", "additionalItems"),
}
"""Keywords that change the meaning of others in the same schema, and are not merged."""

ALTERNATIVES: Final = ("anyOf", "oneOf", "$ref")


def merged(first: Any, second: Any) -> Any:
    """The schema of the values that satisfy both schemas; False if there are none.

    Raises:
        ValueError: both have a keyword whose values are not merged here.
    """
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return False if first is False or second is False else second if first is True else first
    if first.keys() & {"const", "enum"} and second.keys() & {"const", "enum"}:
        first, second = _with_enum(first), _with_enum(second)
    for keyword, names in RELATED.items():
        related = [{name: each[name] for name in names if name in each} for each in (first, second)]
        if (keyword in first or keyword in second) and all(related) and related[0] != related[1]:
            keywords = " or ".join(names)
            raise ValueError(
                f"{keyword} cannot be combined with {keywords} of another schema with integers above 2**53"
            )
    found = {**second, **first}
    for key in first.keys() & second.keys():
        found[key] = _merged_keyword(key, first[key], second[key])
        if key in ("enum", "type") and found[key] == []:
            return False
    if "properties" in found:
        others = [each.get("additionalProperties", True) for each in (first, second)]
        parts = [each.get("properties", {}) for each in (first, second)]
        found["properties"] = {
            name: _both(*(part.get(name, other) for part, other in zip(parts, others, strict=True)))
            for name in [*parts[0], *(name for name in parts[1] if name not in parts[0])]
        }
    if "prefixItems" in found:
        others = [each.get("items", True) for each in (first, second)]
        prefixes = [each.get("prefixItems", []) for each in (first, second)]
        found["prefixItems"] = [
            _both(*(part[index] if index < len(part) else other for part, other in zip(prefixes, others, strict=True)))
            for index in range(max(map(len, prefixes)))
        ]
    extra = [{key: second[key]} for key in ALTERNATIVES if key in first and key in second and first[key] != second[key]]
    return {**found, "allOf": [*found.get("allOf", []), *extra]} if extra else found


def _merged_keyword(key: str, first: Any, second: Any) -> Any:
    """The value of a keyword that two schemas have. A type or an enumeration is empty if no value satisfies both."""
    if first == second or key in ANNOTATIONS or key in ALTERNATIVES or key in ("properties", "prefixItems"):
        return first
    if key in CLOSEST and not isinstance(first, bool) and not isinstance(second, bool):
        return CLOSEST[key](first, second)
    if key == "multipleOf" and isinstance(first, int) and isinstance(second, int):
        return math.lcm(first, second)
    if key in ("additionalProperties", "items") and not isinstance(first, list) and not isinstance(second, list):
        return _both(first, second)
    if key in ("required", "allOf"):
        known = set(map(hashable, first))
        return [*first, *(each for each in second if hashable(each) not in known)]
    if key == "enum":
        permitted = set(map(hashable, second))
        return [each for each in first if hashable(each) in permitted]
    if key == "type":
        types = [declared_types({"type": each}) for each in (first, second)]
        both = [kind for kind in types[0] if kind in types[1] or (kind == "integer" and "number" in types[1])]
        return both + ["integer"] * ("number" in types[0] and "integer" in types[1] and "integer" not in both)
    raise ValueError(f"two values of {key} cannot be combined with integers above 2**53: {first!r:.80}, {second!r:.80}")


def hashable(value: Any) -> Any:
    """The key of a JSON value. It is equal for equal values, and 1 is not true."""
    if isinstance(value, dict):
        return frozenset((name, hashable(each)) for name, each in value.items())
    return tuple(map(hashable, value)) if isinstance(value, list) else (isinstance(value, bool), value)


def _both(first: Any, second: Any) -> Any:
    if isinstance(first, dict) and isinstance(second, dict) and first != second:
        return {"allOf": [first, second]}
    return merged(first, second)


def _with_enum(schema: Mapping[str, Any]) -> dict[str, Any]:
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return {**{key: value for key, value in schema.items() if key != "const"}, "enum": values}
