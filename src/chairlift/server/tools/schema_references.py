"""Resolves the references of a JSON schema by the rules of JSON Schema, to find those that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

SCHEMAS: Final = frozenset(
    ("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else", "propertyNames")
) | {"unevaluatedItems", "unevaluatedProperties", "contentSchema"}
SCHEMA_LISTS: Final = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
SCHEMA_MAPS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
KNOWN_ROOT: Final = ("http://json-schema.org/", "https://json-schema.org/")
"""Where the published schemas of JSON Schema itself are, which llguidance contains."""

Part = tuple[str, Any]


def subschemas(schema: dict[str, Any]) -> Iterator[Part]:
    """Yield the schemas in a schema, with their paths in it. Values, such as those of `enum`, are no schemas."""
    for key, value in schema.items():
        if key in SCHEMA_MAPS and isinstance(value, dict):
            yield from ((f"{key}.{name}", part) for name, part in value.items())
        elif key in SCHEMA_LISTS and isinstance(value, list):
            yield from ((f"{key}.{index}", part) for index, part in enumerate(value))
        elif key in SCHEMAS:
            yield key, value


class SchemaReferences:
    """The resources, anchors and references of one schema.

    Attributes:
        parts: the schemas in it that are objects, with their paths, and also those outside of the keywords of JSON
            Schema to which a reference leads.
        dangling: the ids (`id`) of schemas whose reference leads nowhere.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self.parts: list[tuple[str, dict[str, Any]]] = []
        self.dangling: set[int] = set()
        self._resources: dict[str, Any] = {"": schema}
        self._anchors: dict[tuple[str, str], dict[str, Any]] = {}
        self._references: list[tuple[dict[str, Any], str]] = []
        self._found: set[int] = set()
        self._find("", schema, "")
        for part, base in self._references:  # The list grows when a reference leads to a new place.
            self._resolve(part, base)

    def _find(self, path: str, part: Any, base: str) -> None:
        if not isinstance(part, dict) or id(part) in self._found:
            return
        self._found.add(id(part))
        self.parts.append((path, part))
        if isinstance(identifier := part.get("$id"), str):
            base = urldefrag(urljoin(base, identifier)).url
            self._resources[base] = part
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := part.get(key), str):
                self._anchors[base, anchor] = part
        if isinstance(part.get("$ref"), str):
            self._references.append((part, base))
        for name, child in subschemas(part):
            self._find(f"{path}.{name}", child, base)

    def _resolve(self, part: dict[str, Any], base: str) -> None:
        reference = part["$ref"]
        address, fragment = (base, reference[1:]) if reference.startswith("#") else urldefrag(urljoin(base, reference))
        if address.startswith(KNOWN_ROOT) and address not in self._resources:
            return
        target = self._resources.get(address)
        if fragment.startswith("/"):
            target = _at_pointer(target, unquote(fragment))
        elif fragment:
            target = self._anchors.get((address, fragment))
        if not isinstance(target, (dict, bool)):
            self.dangling.add(id(part))
        self._find(fragment.replace("/", "."), target, address)


def _at_pointer(target: Any, pointer: str) -> Any:
    for key in pointer.split("/")[1:]:
        if isinstance(target, list):
            target = target[int(key)] if key.isdecimal() and int(key) < len(target) else None
        else:
            target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target
