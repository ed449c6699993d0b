"""Scanner of calls whose arguments are between tags, such as `<parameter=KEY>VALUE</parameter>`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from chairlift.server.tools.literal_scanners import NUMBER, CallScanner
from chairlift.server.tools.python_calls import python_value

NAME: Final = re.compile(r"[\w.:-]{1,128}")
KIND_NAMES: Final = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
Kinds = Mapping[str, frozenset[str]]
"""The permitted types of each argument of a tool, by the names of JSON Schema; empty if they are not known."""
ToolKinds = Mapping[str, Kinds]


class TagSyntax(NamedTuple):
    """What follows the name of a call, the opening tag of an argument with a group for its name and perhaps one for the
    start of a CDATA section, the closing tag before the next tag (a value may contain the same text), as regular
    expressions, and the text that ends the call."""

    head: str
    key: str
    value_end: str
    end: str


class TagCallScanner(CallScanner):
    """Reads a call that begins with its name. An argument is written when its value is complete."""

    def __init__(self, tags: TagSyntax, kinds: ToolKinds) -> None:
        super().__init__()
        self._tags, self._kinds = tags, kinds
        self._separator = "{"
        self._searched = 0

    def feed(self, text: str) -> int:
        start = 0
        while not (self.is_done or self.is_broken) and (taken := self._read_element(text[start:])):
            start, self._searched = start + taken, 0
        return start

    def finish(self, text: str) -> None:
        """End an argument that the end of the answer or of the call follows; other text makes the arguments no JSON."""
        key = re.match(self._tags.key, text)
        if key and self._read_element(text.rstrip() + self._tags.end):
            return
        if key and self._kinds_of(key[1]) == {"string"}:
            self._write_argument(key[1], json.dumps(text[key.end() :], ensure_ascii=False)[:-1])
        elif not self._tags.end.startswith(text.strip()):
            self._arguments += text

    def _read_element(self, text: str) -> int:
        """Read the name, an argument, white space or the end; return the number of characters, 0 if more are needed."""
        if self.name is None:
            head = re.match(f"({NAME.pattern}){self._tags.head}", text)
            self.name = head[1] if head else None
            self.is_broken = head is None and not re.fullmatch(rf"{NAME.pattern}[\">\s]*", text)
            return head.end() if head else 0
        if text[:1].isspace():
            return len(text) - len(text.lstrip())
        if text.startswith(self._tags.end):
            self._arguments += "{}" if self._separator == "{" else "}"
            self.is_done = True
            return len(self._tags.end)
        key = re.match(self._tags.key, text)
        end = key and re.compile(self._tags.value_end).search(text, max(key.end(), self._searched))
        self._searched = max(0, len(text) - 80)
        if key is None or end is None:
            tags = (self._tags.key.partition("(")[0], self._tags.end)
            self.is_broken = not any(tag.startswith(text) or text.startswith(tag) for tag in tags)
            return 0
        value = text[key.end() : end.start()].removesuffix("]]>" if key.lastindex == 2 else "")
        self._write_argument(key[1], typed_json(value, self._kinds_of(key[1])))
        return end.end()

    def _kinds_of(self, key: str) -> frozenset[str]:
        return self._kinds.get(self.name or "", {}).get(key, frozenset())

    def _write_argument(self, key: str, value: str) -> None:
        self._arguments += f"{self._separator}{json.dumps(key, ensure_ascii=False)}: {value}"
        self._separator = ", "


def typed_json(text: str, kinds: frozenset[str]) -> str:
    """A value as JSON: of one of these types if the text can be read so, or else a string.

    If it may be a string, or if no type is declared, only what is written like JSON is another value.
    """
    written = text.strip()
    with contextlib.suppress(ValueError):
        read = text if kinds == {"string"} else python_value(written)
        is_permitted = not kinds or bool(_kinds_of_value(read) & kinds)
        is_value = not isinstance(read, str) and is_permitted and _is_like_json(read, written)
        value = read if is_value or (kinds and "string" not in kinds) else text
        if isinstance(value, (int, float)) and NUMBER.fullmatch(written):
            return written
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _is_like_json(value: Any, text: str) -> bool:
    """Whether JSON writes such a value in this form: a number of a telephone, a tuple and a set are text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return NUMBER.fullmatch(text) is not None
    return text.startswith("[" if isinstance(value, list) else "{" if isinstance(value, dict) else "")


def _kinds_of_value(value: Any) -> set[str]:
    kind = KIND_NAMES.get(type(value), "null")
    return {kind, "number"} if kind == "integer" else {kind}


def argument_kinds(parameters: Mapping[str, Any] | None) -> Kinds:
    """The types of the arguments that a schema declares."""
    properties = (parameters or {}).get("properties")
    parts = properties.items() if isinstance(properties, Mapping) else ()
    return {name: frozenset(_kinds(part, parameters or {}, set())) for name, part in parts}


def _kinds(schema: Any, root: Mapping[str, Any], seen: set[int]) -> set[str]:
    if not isinstance(schema, Mapping) or id(schema) in seen or len(seen) > 64:
        return set()
    seen.add(id(schema))
    if isinstance(kind := schema.get("type"), (str, list)):
        return {kind} if isinstance(kind, str) else set(map(str, kind))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    lists = [schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)]
    parts = [part for each in lists for part in each]
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: Any = root
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        parts.append(target)
    return set().union(*map(_kinds_of_value, values), *(_kinds(part, root, seen) for part in parts))
