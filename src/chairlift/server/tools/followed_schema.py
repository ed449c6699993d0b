"""Reduces the schema of a tool to what a grammar can follow, and names what is left out."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

SCHEMAS: Final = frozenset(
    ("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else", "propertyNames")
) | {"unevaluatedItems", "unevaluatedProperties", "contentSchema"}
SCHEMA_LISTS: Final = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
SCHEMA_MAPS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""The keywords with schemas. Other values, such as those of `enum`, are no schemas."""

TYPES: Final = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))
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
STRINGS: Final = frozenset(("$id", "$ref", "$anchor", "$dynamicAnchor", "format"))
INDEX: Final = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)
ADDRESS: Final = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]*")
MAX_NUMBER: Final = 1e21
MAX_PATH_CHARACTERS: Final = 100
MAX_PATTERN_CHARACTERS: Final = 1000
MAX_PATTERNS: Final = 64
"""The maximum number of patterns of a schema whose syntax is checked. Others are left to the compiler of grammars."""


class FollowedSchema:
    """A copy of a schema that llguidance follows completely, as far as that is known without compiling it.

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
        self._reduced: set[int] = set()
        self._references: list[tuple[str, dict[str, Any]]] = []
        self._addresses: set[str] = set()
        self._has_identifiers = False
        self._reduce("", self.schema)
        for path, part in self._references:  # The list grows when a reference leads to a place that is no keyword's.
            reference = part.get("$ref")  # No text if the same object is also read as a map of schemas.
            if isinstance(reference, str) and self._is_dangling(reference):
                self._leave_out(path, part, "$ref")
        self._require_object()

    def _is_dangling(self, reference: str) -> bool:
        """Whether a reference leads nowhere. Those of a schema with identifiers are left to the compiler."""
        if not reference.startswith("#/"):
            return not (self._has_identifiers or reference in self._addresses or "://json-schema.org/" in reference)
        target: Any = self.schema
        for key in unquote(reference[2:]).split("/"):
            if isinstance(target, list):
                target = target[int(key)] if INDEX.fullmatch(key) and int(key) < len(target) else None
            else:
                target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        self._reduce(reference[2 : 2 + MAX_PATH_CHARACTERS].replace("/", "."), target)
        return not (isinstance(target, (dict, bool)) or self._has_identifiers)

    def _require_object(self) -> None:
        """Arguments are an object, even if the schema permits other values."""
        kinds = self.schema.get("type", "object")
        if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
            self._leave_out("", self.schema, "type")
        self.schema["type"] = "object"

    def _leave_out(self, path: str, part: dict[str, Any], key: str) -> None:
        del part[key]
        self.left_out.append(_joined(path, key))

    def _reduce(self, path: str, part: Any) -> None:
        if not isinstance(part, dict) or id(part) in self._reduced:
            return
        self._reduced.add(id(part))
        for key, value in list(part.items()):
            if key in ANNOTATIONS or (key in NEUTRAL and value in NEUTRAL[key]):
                del part[key]
            elif key in UNFOLLOWED or not self._is_valid(key, value):
                self._leave_out(path, part, key)
        if "://json-schema.org/" not in str(part.get("$schema")):
            part.pop("$schema", None)
        if "$dynamicAnchor" in part:
            part.setdefault("$anchor", part.pop("$dynamicAnchor"))
        self._addresses |= {"#", part.get("$id") or "#", "#" + part.get("$anchor", "")}
        self._has_identifiers |= not part.get("$id", "#").startswith("#")
        if "$ref" in part:
            self._references.append((path, part))
        self._reduce_format(path, part)
        for key in list(part):
            if key in ("minimum", "exclusiveMinimum"):
                part[key] = max(part[key], -LARGEST)
            elif key in SCHEMAS or key in SCHEMA_LISTS or key in SCHEMA_MAPS:
                self._reduce_subschemas(_joined(path, key), part, key)

    def _reduce_subschemas(self, path: str, part: dict[str, Any], key: str) -> None:
        """Reduce the schemas of a keyword. A value that is no schema is replaced by one that permits everything."""
        value = part[key]
        is_list = key in SCHEMA_LISTS and isinstance(value, list)
        holder: Any = value if is_list or key in SCHEMA_MAPS else {key: value}
        for name, child in list(enumerate(holder) if is_list else holder.items()):
            place = path if holder is not value else _joined(path, name)
            if isinstance(child, (dict, bool)):
                self._reduce(place, child)
            else:
                self.left_out.append(place)
                (part if holder is not value else holder)[name] = True

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

    def _reduce_format(self, path: str, part: dict[str, Any]) -> None:
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
            self._leave_out(path, part, "format")


def _joined(path: str, key: object) -> str:
    return (f"{path}.{key}" if path else str(key))[:MAX_PATH_CHARACTERS]


@lru_cache(256)
def is_followed_pattern(pattern: str) -> bool:
    """Whether llguidance supports the syntax of a regular expression: no look-around, back-references or \\b."""
    from llguidance import LLMatcher

    schema = {"type": "string", "pattern": pattern}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
