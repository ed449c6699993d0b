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
DIALECTS: Final = frozenset(
    f"{address}/schema"
    for address in (
        *(f"http://json-schema.org/draft-0{number}" for number in (4, 6, 7)),
        *(f"https://json-schema.org/draft/{name}" for name in ("2019-09", "2020-12")),
    )
)
"""The values of `$schema` that llguidance knows. It tries to load others, and fails."""

COUNTS: Final = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
UNFOLLOWED: Final = frozenset((
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "$dynamicRef", "unevaluatedItems", "unevaluatedProperties", "dependentSchemas", "dependentRequired",
    "dependencies", "$recursiveRef",
))  # fmt: skip
OF_TOOLS: Final = UNFOLLOWED | PATTERNS | {"format", "$ref"}
"""The keywords that are left out of the schema of a tool if no grammar follows them."""

ANNOTATED: Final = frozenset(("format", "uniqueItems", "propertyNames"))
"""The keywords that are left out of the schema of an answer: classes of pydantic have them for types such as `Path`,
`set` and `dict[UUID, int]`."""

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

INTEGER_FORMATS: Final[dict[str, dict[str, int]]] = {
    **{f"int{bits}": {"minimum": -1 << (bits - 1), "maximum": (1 << (bits - 1)) - 1} for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": {"minimum": 0, "maximum": (1 << bits) - 1} for bits in (8, 16, 32, 64)},
    "uint": {"minimum": 0},
}
INERT: Final = ANNOTATIONS | {"$defs", "definitions", "$schema", "$id"}
MAX_REFERENCES: Final = 100
"""The maximum number of references in a row. A longer chain counts as one without an end."""

NUMBER_FORMATS: Final = frozenset(("float", "double"))
MAX_PATH_CHARACTERS: Final = 100
MAX_PATTERN_CHARACTERS: Final = 1000
MAX_PATTERNS: Final = 64
"""The maximum number of patterns of a schema whose syntax is checked. Others are left to the compiler of grammars."""


class FollowedSchema:
    """A copy of a valid schema that llguidance follows completely, if all that it does not follow may be left out.

    A schema that is not valid, or whose references lead nowhere, is left to the compiler (see `relax_calls`).

    Args:
        schema: the schema of the arguments of a tool, or of an answer.
        unfollowed: the keywords that are left out if they are not followed. `$schema` is one of them in any case.
        is_arguments: the values are objects, even if the schema permits others.

    Attributes:
        schema: the copy, without annotations. Integers with a format such as int32 have its bounds.
        left_out: the paths of the keywords that were left out, as far as MAX_PATH_CHARACTERS.
    """

    def __init__(
        self, schema: Mapping[str, Any], unfollowed: frozenset[str] = OF_TOOLS, *, is_arguments: bool = True
    ) -> None:
        self.schema: dict[str, Any] = copy.deepcopy(dict(schema))
        self.left_out: list[str] = []
        self._unfollowed, self._num_patterns = unfollowed, 0
        self._reduce("", self.schema)
        if is_arguments and "type" in self.schema and "object" not in declared_types(self.schema):
            self._leave_out("", self.schema, "type")
        if is_arguments:
            self.schema["type"] = "object"

    def _leave_out(self, path: str, part: dict[str, Any], key: str) -> None:
        del part[key]
        self.left_out.append(_joined(path, key))

    def _reduce(self, path: str, part: Any) -> None:
        if not isinstance(part, dict):
            return
        for key, value in list(part.items()):
            if key in ANNOTATIONS or value in NEUTRAL.get(key, ()):
                del part[key]
            elif key in self._unfollowed | {"$schema"} and not self._is_followed(key, value, part):
                self._leave_out(path, part, key)
            elif key == "$ref" and self._is_endless(part):
                raise ValueError(
                    f"{_joined(path, key)} {value!r:.100} leads only to itself, so that no value satisfies it: give "
                    "the schema that it leads to other keywords"
                )
            elif key in COUNTS and isinstance(value, float) and value.is_integer():
                part[key] = int(value)
            elif key in SCHEMA_MAPS and isinstance(value, dict):
                for name, child in value.items():
                    self._reduce(_joined(_joined(path, key), name), child)
            elif key in SCHEMA_LISTS and isinstance(value, list):
                for index, child in enumerate(value):
                    self._reduce(_joined(_joined(path, key), index), child)
            elif key in SCHEMAS:
                self._reduce(_joined(path, key), value)
        if isinstance(part.get("format"), str) and "format" in self._unfollowed:
            self._reduce_format(path, part, part["format"])

    def _is_followed(self, key: str, value: Any, part: dict[str, Any]) -> bool:
        if key == "$schema":
            return isinstance(value, str) and value.removesuffix("#") in DIALECTS
        if key == "$ref":
            return not self._is_endless(part)
        return key == "format" or (key in PATTERNS and self._has_followed_patterns(value))

    def _is_endless(self, part: Any) -> bool:
        """Whether a schema has only a reference, which leads through other such schemas back to itself."""
        for _ in range(MAX_REFERENCES):
            keys = part.keys() - INERT if isinstance(part, dict) else frozenset()
            (key,) = keys if len(keys) == 1 else ("",)
            if key in ("allOf", "anyOf", "oneOf") and isinstance(part[key], list) and len(part[key]) == 1:
                part = part[key][0]
            elif key == "$ref":
                part = self._target(part[key])
            else:
                return False
        return True

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        target: Any = self.schema
        for name in reference.split("/")[1:]:
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        return target

    def _has_followed_patterns(self, value: Any) -> bool:
        """Whether the patterns that a keyword has as its value, or as the keys of its value, are followed."""
        for pattern in value if isinstance(value, dict) else [value]:
            self._num_patterns += 1
            is_checked = self._num_patterns <= MAX_PATTERNS and isinstance(pattern, str)
            if is_checked and len(pattern) <= MAX_PATTERN_CHARACTERS and not is_followed_pattern(pattern):
                return False
        return True

    def _reduce_format(self, path: str, part: dict[str, Any], kind: str) -> None:
        types = declared_types(part)
        if kind in INTEGER_FORMATS and types != ["string"]:
            del part["format"]
            for key, bound in INTEGER_FORMATS[kind].items():
                closest = max if key == "minimum" else min
                part[key] = closest(bound, given) if isinstance(given := part.get(key), (int, float)) else bound
        elif kind in NUMBER_FORMATS and "string" not in types:
            del part["format"]
        elif kind not in FORMATS:
            self._leave_out(path, part, "format")


def declared_types(part: Mapping[str, Any]) -> list[Any]:
    """The types that a schema names; none if it permits all."""
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
