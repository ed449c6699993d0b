"""Reduces the schema of a tool to what a grammar can follow, and names what is left out."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from chairlift.server.tools.schema_references import SCHEMA_MAPS, SchemaReferences, subschemas

TYPES: Final = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))
ANNOTATIONS: Final = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment")
)
UNFOLLOWED: Final = frozenset(
    ("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames")
) | {"unevaluatedItems", "unevaluatedProperties", "dependentSchemas", "dependentRequired", "dependencies"}
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "not": (False,),
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentSchemas": ({},),
    "dependentRequired": ({},),
    "dependencies": ({},),
}
"""Values with which a keyword that is not followed has no effect."""

FORMATS: Final = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
"""The formats of strings that llguidance follows."""

LARGEST: Final = (1 << 63) - 1024
"""The largest absolute value of a minimum, which llguidance reads as a double and converts to 64 bits."""

INTEGER_FORMATS: Final[dict[str, tuple[int, int | None]]] = {
    **{f"int{bits}": (-1 << (bits - 1), (1 << (bits - 1)) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
    "int64": (-LARGEST, LARGEST),
    "uint": (0, None),
}
NUMBER_FORMATS: Final = frozenset(("float", "double"))
BOUNDS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
COUNTS: Final = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
CHOICES: Final = frozenset(("enum", "anyOf", "oneOf"))
STRINGS: Final = frozenset(("$id", "$ref", "$anchor", "format"))
ADDRESS: Final = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]*")
MAX_NUMBER: Final = 1e21
MAX_PATTERN_CHARACTERS: Final = 1000
MAX_PATTERNS: Final = 64
"""The maximum number of patterns of a schema whose syntax is checked. Others are left to the compiler of grammars."""


class FollowedSchema:
    """A copy of a schema that llguidance follows completely, as far as that is known without compiling it.

    Args:
        schema: the schema of the arguments of a tool.

    Attributes:
        schema: the copy, without annotations. Integers with a format such as int32 have its bounds.
        left_out: the paths of the keywords that were left out.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema: dict[str, Any] = copy.deepcopy(dict(schema))
        self.left_out: list[str] = []
        self._num_patterns = 0
        references = SchemaReferences(self.schema)
        for path, part in references.parts:
            self._path = path
            self._reduce(part, id(part) in references.dangling)
        self._path = ""
        self._require_object()

    def _require_object(self) -> None:
        """Arguments are an object, even if the schema permits other values."""
        kinds = self.schema.get("type", "object")
        if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
            self._leave_out(self.schema, "type")
        self.schema["type"] = "object"

    def _leave_out(self, part: dict[str, Any], key: str) -> None:
        del part[key]
        self.left_out.append(f"{self._path}.{key}".lstrip("."))

    def _reduce(self, part: dict[str, Any], is_dangling: bool) -> None:
        for key in part.keys() & ANNOTATIONS:
            del part[key]
        self._reduce_references(part, is_dangling)
        for key in part.keys() & UNFOLLOWED:
            if part[key] in NEUTRAL.get(key, ()):
                del part[key]
            else:
                self._leave_out(part, key)
        for key in [key for key, value in part.items() if not self._is_valid(key, value)]:
            self._leave_out(part, key)
        self._reduce_subschemas(part)
        self._reduce_format(part)
        self._reduce_bounds(part)

    def _reduce_references(self, part: dict[str, Any], is_dangling: bool) -> None:
        if is_dangling:
            self._leave_out(part, "$ref")
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in part:
                self._leave_out(part, key)
        part.pop("$recursiveAnchor", None)
        if "$dynamicAnchor" in part:
            part.setdefault("$anchor", part.pop("$dynamicAnchor"))
        dialect = part.get("$schema", "")
        if not isinstance(dialect, str) or "://json-schema.org/" not in dialect:
            part.pop("$schema", None)

    def _is_valid(self, key: str, value: Any) -> bool:
        """Whether the value of a keyword can be read, and is not impossible to follow."""
        if key in STRINGS:
            return isinstance(value, str) and (key != "$id" or ADDRESS.fullmatch(value) is not None)
        if key == "type":
            kinds = value if isinstance(value, list) else [value]
            return bool(kinds) and all(isinstance(kind, str) and kind in TYPES for kind in kinds)
        if key == "pattern":
            return isinstance(value, str) and self._is_pattern(value)
        if key == "patternProperties":
            return isinstance(value, dict) and all(map(self._is_pattern, value))
        if key == "required":
            return isinstance(value, list) and all(isinstance(name, str) for name in value)
        if key in COUNTS or key in BOUNDS:
            is_number = isinstance(value, (int, float)) and abs(value) < MAX_NUMBER
            return is_number and (key in BOUNDS or (value >= 0 and value == int(value)))
        if key in CHOICES:
            return isinstance(value, list) and bool(value)
        return key not in SCHEMA_MAPS or isinstance(value, dict)

    def _is_pattern(self, pattern: str) -> bool:
        self._num_patterns += 1
        is_checked = self._num_patterns <= MAX_PATTERNS and len(pattern) <= MAX_PATTERN_CHARACTERS
        return not is_checked or is_followed_pattern(pattern)

    def _reduce_subschemas(self, part: dict[str, Any]) -> None:
        """Replace values that are no schemas by one that permits everything."""
        for path, child in list(subschemas(part)):
            key, _, name = path.partition(".")
            if not isinstance(child, (dict, bool)) and not (key == path and isinstance(child, list)):
                self.left_out.append(f"{self._path}.{path}".lstrip("."))
                holder: Any = part[key] if name else part
                holder[int(name) if isinstance(holder, list) else name or key] = True

    def _reduce_format(self, part: dict[str, Any]) -> None:
        kind, types = part.get("format"), part.get("type", [])
        if kind in INTEGER_FORMATS and types != "string":
            del part["format"]
            low, high = INTEGER_FORMATS[kind]
            part["minimum"] = max(low, part.get("minimum", low))
            if high is not None:
                part["maximum"] = min(high, part.get("maximum", high))
        elif kind in NUMBER_FORMATS and "string" not in types:
            del part["format"]
        elif kind is not None and kind not in FORMATS:
            self._leave_out(part, "format")

    def _reduce_bounds(self, part: dict[str, Any]) -> None:
        for key in ("minimum", "exclusiveMinimum"):
            if key in part and not isinstance(part[key], bool):
                part[key] = max(part[key], -LARGEST)


@lru_cache(256)
def is_followed_pattern(pattern: str) -> bool:
    """Whether llguidance supports the syntax of a regular expression: no look-around, back-references or \\b."""
    from llguidance import LLMatcher

    schema = {"type": "string", "pattern": pattern}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
