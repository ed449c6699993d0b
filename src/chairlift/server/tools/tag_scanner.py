"""Scanner of calls whose arguments are between tags, such as `<parameter=KEY>VALUE</parameter>`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from chairlift.server.tools.literal_scanners import NUMBER, CallScanner
from chairlift.server.tools.python_calls import python_value

NAME: Final = re.compile(r"[\w.:-]{1,128}")
KIND_NAMES: Final = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
NO_STRING: Final = frozenset({*KIND_NAMES.values(), "null"}) - {"string"}
MAX_NESTED_TAGS: Final = 64
MAX_TAG_CHARACTERS: Final = 80


class ValueSchema(NamedTuple):
    """The JSON schema of a value, and the document in which its references are resolved."""

    schema: Any
    root: Mapping[str, Any]

    def kinds(self) -> frozenset[str]:
        """The types that it permits, by the names of JSON Schema; empty if they are not declared."""
        return frozenset(_kinds(self.schema, self.root, set()))

    def member(self, name: str) -> ValueSchema:
        """The schema of a member of an object; in an array all elements have the name `item`."""
        for part in _parts(self.schema, self.root, set()):
            properties, items = part.get("properties"), part.get("items")
            if isinstance(properties, Mapping) and name in properties:
                return ValueSchema(properties[name], self.root)
            if name == "item" and items is not None:
                return ValueSchema(items, self.root)
        return ValueSchema(None, self.root)


ToolKinds = Mapping[str, ValueSchema]
"""The schemas of the arguments of the tools."""
UNDECLARED: Final = ValueSchema(None, {})


class TagSyntax(NamedTuple):
    """How the arguments of a call are written between tags, as regular expressions.

    Attributes:
        head: what follows the name of the call.
        key: the opening tag of an argument, with a group for its name, and perhaps the groups `cdata` for the start
            of a section and `type` for a type, of which `string` and `true` are strings.
        value_end: the closing tag before the next tag, because a value may contain the same text.
        end: the text that ends the call.
        is_nested: arrays and objects are tags too. Then `value_end` is any tag, with a group that is empty in opening
            tags.
    """

    head: str
    key: str
    value_end: str
    end: str
    is_nested: bool = False


HEAD_BEGINNING: Final = re.compile(rf"""{NAME.pattern}[">\s]*(?:["<][^\n]{{0,{MAX_TAG_CHARACTERS}}})?""")
"""A name, and what may be the beginning of the text after it."""


class TagCallScanner(CallScanner):
    """Reads a call that begins with its name. An argument is written when its value is complete."""

    def __init__(self, tags: TagSyntax, kinds: ToolKinds) -> None:
        super().__init__()
        self._tags, self._kinds = tags, kinds
        self._separator = "{"
        self._searched, self._depth = 0, 1

    def feed(self, text: str) -> int:
        start = 0
        while not (self.is_done or self.is_broken) and (taken := self._read_element(text[start:])):
            start, self._searched, self._depth = start + taken, 0, 1
        return start

    def finish(self, text: str) -> None:
        """End an argument that the end of the answer or of the call follows; other text makes the arguments no JSON."""
        key = re.match(self._tags.key, text)
        if key and not self._tags.is_nested and self._read_element(text.rstrip() + self._tags.end):
            return
        if key and self._kinds_of(key) == {"string"}:
            self._write_argument(key[1], json.dumps(text[key.end() :], ensure_ascii=False)[:-1])
        elif not self._tags.end.startswith(text.strip()):
            self._arguments += text

    def _read_element(self, text: str) -> int:
        """Read the name, an argument, white space or the end; return the number of characters, 0 if more are needed."""
        if self.name is None:
            head = re.match(f"({NAME.pattern}){self._tags.head}", text)
            self.name = self._declared_name(head[1]) if head else None
            self.is_broken = head is None and not HEAD_BEGINNING.fullmatch(text)
            return head.end() if head else 0
        if text[:1].isspace():
            return len(text) - len(text.lstrip())
        if text.startswith(self._tags.end):
            self._arguments += "{}" if self._separator == "{" else "}"
            self.is_done = True
            return len(self._tags.end)
        key = re.match(self._tags.key, text)
        end = self._value_end(text, key.end()) if key else None
        if key is None or end is None:
            opening = re.sub(r"\\(.)", r"\1", self._tags.key.partition("(")[0])
            self.is_broken = not any(tag.startswith(text) or text.startswith(tag) for tag in (opening, self._tags.end))
            return 0
        value = text[key.end() : end.start()].removesuffix("]]>" if key.groupdict().get("cdata") else "")
        if self._tags.is_nested:
            self._write_argument(key[1], nested_json(value, self._schema_of(key[1]), self._tags))
        else:
            self._write_argument(key[1], typed_json(value, self._kinds_of(key)))
        return end.end()

    def _value_end(self, text: str, start: int) -> re.Match[str] | None:
        for tag in re.compile(self._tags.value_end).finditer(text, max(start, self._searched)):
            self._depth += self._tags.is_nested and (-1 if tag[1] else 1)
            self._searched = tag.end()
            if self._depth == 0 or not self._tags.is_nested:
                return tag
        self._searched = max(self._searched, len(text) - MAX_TAG_CHARACTERS)
        return None

    def _declared_name(self, name: str) -> str:
        """The name of the tool. Muse Glimmer may write a name without a namespace twice: `f.f`."""
        half = name[: len(name) // 2]
        return half if name == f"{half}.{half}" and name not in self._kinds and half in self._kinds else name

    def _schema_of(self, key: str) -> ValueSchema:
        return self._kinds.get(self.name or "", UNDECLARED).member(key)

    def _kinds_of(self, key: re.Match[str]) -> frozenset[str]:
        """The types of an argument: those that the schema declares, as far as its tag permits them."""
        declared, written = self._schema_of(key[1]).kinds(), key.groupdict().get("type")
        if written is None:
            return declared
        permitted = frozenset({"string"}) if written in ("string", "true") else NO_STRING
        return declared & permitted or declared or permitted

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


def nested_json(text: str, schema: ValueSchema, tags: TagSyntax, depth: int = 0) -> str:
    """A value as JSON: nested tags are objects, or arrays if all have the name `item`; other text is `typed_json`."""
    kinds = schema.kinds()
    children = list(_children(text, tags)) if depth < MAX_NESTED_TAGS else []
    if not children:
        containers = kinds & {"array", "object"} if "string" not in kinds and not text.strip() else None
        return ("[]" if "array" in containers else "{}") if containers else typed_json(text, kinds)
    values: dict[str, list[str]] = {}
    for name, value in children:
        values.setdefault(name, []).append(nested_json(value, schema.member(name), tags, depth + 1))
    lists = {name: f"[{', '.join(parts)}]" if len(parts) > 1 else parts[0] for name, parts in values.items()}
    if [*lists] == ["item"] and kinds != {"object"}:
        return f"[{', '.join(values['item'])}]"
    return f"{{{', '.join(f'{json.dumps(name, ensure_ascii=False)}: {value}' for name, value in lists.items())}}}"


def _children(text: str, tags: TagSyntax) -> Iterator[tuple[str, str]]:
    """The names and texts of the tags in a text that begins with one."""
    at = 0
    while opening := re.compile(rf"\s*{tags.key}").match(text, at):
        depth, at = 1, len(text)
        for tag in re.compile(tags.value_end).finditer(text, opening.end()):
            depth += -1 if tag[1] else 1
            if depth == 0:
                yield opening[1], text[opening.end() : tag.start()]
                at = tag.end()
                break


def argument_kinds(parameters: Mapping[str, Any] | None) -> ValueSchema:
    """The types of the arguments that a schema declares."""
    return ValueSchema(parameters or {}, parameters or {})


def _parts(schema: Any, root: Mapping[str, Any], seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """A schema, and those that it refers to or combines."""
    if not isinstance(schema, Mapping) or id(schema) in seen or len(seen) > 64:
        return
    seen.add(id(schema))
    yield schema
    lists = [schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)]
    parts = [part for each in lists for part in each]
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: Any = root
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        parts.append(target)
    for part in parts:
        yield from _parts(part, root, seen)


def _kinds(schema: Any, root: Mapping[str, Any], seen: set[int]) -> set[str]:
    found: set[str] = set()
    for part in _parts(schema, root, seen):
        kind, values = part.get("type"), part.get("enum")
        if isinstance(kind, (str, list)):
            found |= {kind} if isinstance(kind, str) else set(map(str, kind))
        else:
            values = values if isinstance(values, list) else [part["const"]] if "const" in part else []
            found |= set().union(*map(_kinds_of_value, values))
    return found
