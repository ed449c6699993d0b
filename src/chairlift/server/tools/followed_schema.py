"""Reduces the schema of a tool to what a grammar can follow, and names what is left out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

SCHEMAS: Final = frozenset(("additionalProperties", "additionalItems", "items", "contentSchema"))
SCHEMA_LISTS: Final = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
SCHEMA_MAPS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""The keywords with schemas. The values of other keywords, such as `enum`, are no schemas."""

PATTERNS: Final = frozenset(("pattern", "patternProperties"))
"""The keywords with regular expressions."""

ANNOTATIONS: Final = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment")
) | {"$recursiveAnchor", "$vocabulary"}
UNFOLLOWED: Final = frozenset((
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "$dynamicRef", "unevaluatedItems", "unevaluatedProperties", "dependentSchemas", "dependentRequired",
    "dependencies", "$recursiveRef",
))  # fmt: skip
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("not", "uniqueItems"), (False,)),
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("dependentSchemas", "dependentRequired", "dependencies"), ({},)),
}
"""Values with which a keyword that is not followed has no effect."""

FORMATS: Final = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
"""The formats of strings that llguidance follows."""

LARGEST: Final = (1 << 63) - 1024
"""The largest absolute value of a minimum, which llguidance reads as a double and converts to 64 bits."""

INTEGER_FORMATS: Final[dict[str, dict[str, int]]] = {
    **{f"int{bits}": {"minimum": -1 << (bits - 1), "maximum": (1 << (bits - 1)) - 1} for bits in (8, 16, 32)},
    **{f"uint{bits}": {"minimum": 0, "maximum": (1 << bits) - 1} for bits in (8, 16, 32, 64)},
    "int64": {"minimum": -LARGEST, "maximum": LARGEST},
    "uint": {"minimum": 0},
}
NUMBER_FORMATS: Final = frozenset(("float", "double"))
MAX_PATH_CHARACTERS: Final = 100
MAX_PATTERN_CHARACTERS: Final = 1000
MAX_PATTERNS: Final = 64
"""The maximum number of patterns of a schema whose syntax is checked. Others are left to the compiler of grammars."""


class FollowedSchema:
    """A copy of a valid schema that llguidance follows completely.

    A schema that is not valid, or whose references lead nowhere, is left to the compiler (see `relax_calls`).

    Args:
        schema: the schema of the arguments of a tool.

    Attributes:
        schema: the copy, without annotations. Integers with a format such as int32 have its bounds.
        left_out: the paths of the keywords that were left out, as far as MAX_PATH_CHARACTERS.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema: dict[str, Any] = copy.deepcopy(dict(schema))
        self.left_out: list[str] = []
        self._num_patterns = 0
        self._reduce("", self.schema)
        if "type" in self.schema and "object" not in _types(self.schema):
            self._leave_out("", self.schema, "type")
        self.schema["type"] = "object"  # Arguments are an object, even if the schema permits other values.

    def _leave_out(self, path: str, part: dict[str, Any], key: str) -> None:
        del part[key]
        self.left_out.append(_joined(path, key))

    def _reduce(self, path: str, part: Any) -> None:
        if not isinstance(part, dict):
            return
        for key, value in list(part.items()):
            if key in ANNOTATIONS or value in NEUTRAL.get(key, ()):
                del part[key]
            elif key in UNFOLLOWED or (key in PATTERNS and not self._is_followed(value)):
                self._leave_out(path, part, key)
            elif key in ("minimum", "exclusiveMinimum") and isinstance(value, (int, float)):
                part[key] = max(value, -LARGEST)
            elif key in SCHEMA_MAPS and isinstance(value, dict):
                for name, child in value.items():
                    self._reduce(_joined(_joined(path, key), name), child)
            elif key in SCHEMA_LISTS and isinstance(value, list):
                for index, child in enumerate(value):
                    self._reduce(_joined(_joined(path, key), index), child)
            elif key in SCHEMAS:
                self._reduce(_joined(path, key), value)
        if isinstance(part.get("format"), str):
            self._reduce_format(path, part, part["format"])

    def _is_followed(self, value: Any) -> bool:
        """Whether the patterns that a keyword has as its value, or as the keys of its value, are followed."""
        for pattern in value if isinstance(value, dict) else [value]:
            self._num_patterns += 1
            is_checked = self._num_patterns <= MAX_PATTERNS and isinstance(pattern, str)
            if is_checked and len(pattern) <= MAX_PATTERN_CHARACTERS and not is_followed_pattern(pattern):
                return False
        return True

    def _reduce_format(self, path: str, part: dict[str, Any], kind: str) -> None:
        types = _types(part)
        if kind in INTEGER_FORMATS and types != ["string"]:
            del part["format"]
            for key, bound in INTEGER_FORMATS[kind].items():
                closest = max if key == "minimum" else min
                part[key] = closest(bound, given) if isinstance(given := part.get(key), (int, float)) else bound
        elif kind in NUMBER_FORMATS and "string" not in types:
            del part["format"]
        elif kind not in FORMATS:
            self._leave_out(path, part, "format")


def _types(part: dict[str, Any]) -> list[Any]:
    types = part.get("type", [])
    return types if isinstance(types, list) else [types]


def _joined(path: str, key: object) -> str:
    return (f"{path}.{key}" if path else str(key))[:MAX_PATH_CHARACTERS]


@lru_cache(256)
def is_followed_pattern(pattern: str) -> bool:
    """Whether llguidance supports the syntax of a regular expression: no look-around, back-references or \\b."""
    from llguidance import LLMatcher

    schema = {"type": "string", "pattern": pattern}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
