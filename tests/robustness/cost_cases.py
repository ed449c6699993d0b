"""Bodies that grow in one field: for every endpoint, each field that holds a list, a string or an object.

The fields come from the JSON schema of the endpoint's body. A case is a path through that schema; `Case.body(size)` is
a body of about `size` bytes, valid or not, in which the value at the path is large and everything else is minimal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from chairlift.server.preparation.planners import EndpointPlanners

MAX_DEPTH: Final = 7
PATHS: Final = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
"""Attribute of `EndpointPlanners` -> path of the endpoint."""

BASES: Final[dict[str, dict[str, Any]]] = {
    "completions": {"prompt": "x", "max_tokens": 1},
    "chat": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "responses": {"input": "x", "max_output_tokens": 1},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "tokenize": {"prompt": "x"},
    "detokenize": {"tokens": [3]},
}
NUMBERED: Final = ("name", "id", "call_id", "tool_call_id")
"""Strings that differ from item to item, so that checks for repeated names have something to compare."""


@dataclass(frozen=True, slots=True)
class Case:
    """One field of one endpoint.

    Attributes:
        endpoint: attribute of `EndpointPlanners`.
        field: the path of the field, as in `messages[].content`.
        make: number of items -> the body.
    """

    endpoint: str
    field: str
    make: Callable[[int], dict[str, Any]]

    def body(self, size: int) -> bytes:
        """A body of at most `size` bytes, and nearly as many."""
        few, more = (len(_encoded(self.make(count))) for count in (64, 128))
        count = max(1, 64 + int((size - few) * 64 / max(1, more - few)))
        content = _encoded(self.make(count))
        while len(content) > size and count > 1:
            count = int(count * size / len(content) * 0.98)
            content = _encoded(self.make(count))
        return content


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def all_cases(planners: type[EndpointPlanners] | EndpointPlanners) -> list[Case]:
    """The cases of all endpoints."""
    cases = []
    for endpoint, base in BASES.items():
        body_type = _body_type(planners, endpoint)
        schema = body_type.model_json_schema()
        for name, field in schema["properties"].items():
            for path, grow in _growing(field, schema.get("$defs", {}), name, 0):
                cases.append(Case(endpoint, path, _placed(base, name, grow)))
    return [*cases, *extra_cases()]


def _body_type(planners: type[EndpointPlanners] | EndpointPlanners, endpoint: str) -> Any:
    return getattr(planners, endpoint).body_type


def _placed(base: dict[str, Any], name: str, grow: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    # /tokenize takes either a prompt or messages, and fields of messages only beside these.
    other = {"prompt": None} if "prompt" in base and name == "messages" else {}

    def make(count: int) -> dict[str, Any]:
        body = {**base, **other, name: grow(count)}
        return {key: value for key, value in body.items() if value is not None}

    return make


Grow = Callable[[int], Any]


def _growing(schema: dict[str, Any], definitions: dict[str, Any], path: str, depth: int) -> Iterator[tuple[str, Grow]]:
    """Each way in which a value of this schema can be large."""
    for form in _forms(schema, definitions):
        kind = form.get("type")
        if kind == "string" and "const" not in form and "enum" not in form:
            yield f"{path} (string)", lambda count: "x " * (count // 2)
        elif kind == "array":
            item = form.get("items", {})
            yield f"{path}[]", lambda count, item=item: [example(item, definitions, n) for n in range(count)]
            if depth < MAX_DEPTH:
                for inner, grow in _growing(item, definitions, f"{path}[]", depth + 1):
                    yield inner, lambda count, grow=grow: [grow(count)]
        elif kind == "object" and "properties" in form:
            yield from _growing_in_object(form, definitions, path, depth)
        elif kind == "object" or kind is None:
            yield f"{path} (object)", lambda count: {f"k{n}": n for n in range(count)}
            yield f"{path} (lists)", lambda count: {"k": [[] for _ in range(count)]}


def _growing_in_object(
    form: dict[str, Any], definitions: dict[str, Any], path: str, depth: int
) -> Iterator[tuple[str, Grow]]:
    if depth >= MAX_DEPTH:
        return
    for name, field in form["properties"].items():
        for inner, grow in _growing(field, definitions, f"{path}.{name}", depth + 1):
            yield inner, lambda count, name=name, grow=grow: {**example(form, definitions, 0), name: grow(count)}


def _forms(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The alternatives of a schema, without references and null."""
    if "$ref" in schema:
        yield from _forms(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    elif alternatives := schema.get("anyOf", schema.get("oneOf")):
        for alternative in alternatives:
            yield from _forms(alternative, definitions)
    elif schema.get("type") != "null":
        yield schema


def example(schema: dict[str, Any], definitions: dict[str, Any], number: int, name: str = "") -> Any:
    """A small valid value of a schema; strings that identify something contain `number`."""
    form = next(_forms(schema, definitions), {"type": "null"})
    if "const" in form:
        return form["const"]
    if "enum" in form:
        return form["enum"][0]
    match form.get("type"):
        case "string":
            return f"n{number}" if name in NUMBERED else "x"
        case "integer" | "number":
            return 3
        case "boolean":
            return False
        case "array":
            return [example(form.get("items", {}), definitions, number)] if form.get("minItems") else []
        case "object":
            required = form.get("required", [])
            fields = form.get("properties", {})
            return {key: example(fields[key], definitions, number, key) for key in fields if key in required}
    return None


def extra_cases() -> list[Case]:
    """Values whose cost is not that of their size: patterns, schemas, escapes, spellings of special tokens."""

    def chat(field: str, value: Grow) -> Callable[[int], dict[str, Any]]:
        return lambda count: {**BASES["chat"], field: value(count)}

    def content(text: Grow) -> Grow:
        return lambda count: [{"role": "user", "content": text(count)}]

    def properties(count: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}

    def structured(field: str, value: Grow) -> Grow:
        return lambda count: {field: value(count)}

    cases = {
        "messages (special tokens)": chat("messages", content(lambda count: "<|im_end|>" * (count // 10))),
        "messages (escapes)": chat("messages", content(lambda count: "\x01" * (count // 6))),
        "messages (one letter)": chat("messages", content(lambda count: "a" * count)),
        "messages (two roles)": chat(
            "messages",
            lambda count: [{"role": ("user", "assistant")[n % 2], "content": "x"} for n in range(count)],
        ),
        "messages (tool results)": chat(
            "messages",
            lambda count: [{"role": "tool", "content": "x", "tool_call_id": f"n{n}"} for n in range(count)],
        ),
        "structured_outputs.regex (repetition)": chat(
            "structured_outputs", structured("regex", lambda count: f"a{{{count}}}")
        ),
        "structured_outputs.regex (alternatives)": chat(
            "structured_outputs", structured("regex", lambda count: "|".join(f"x{n}" for n in range(count)))
        ),
        "structured_outputs.json (properties)": chat("structured_outputs", structured("json", properties)),
        "structured_outputs.json (enum)": chat(
            "structured_outputs", structured("json", lambda count: {"enum": [f"v{n}" for n in range(count)]})
        ),
        "tools (schema)": chat(
            "tools",
            lambda count: [{"type": "function", "function": {"name": "f", "parameters": properties(count)}}],
        ),
        "unknown field": lambda count: {**BASES["chat"], "x" * count: 1},
        "unknown fields": lambda count: {**BASES["chat"], **{f"x{n}": 1 for n in range(count)}},
    }
    found = [Case("chat", field, make) for field, make in cases.items()]
    prompts: dict[str, Grow] = {
        "prompt (token ids)": lambda count: [3] * count,
        "prompt (lists of token ids)": lambda count: [[3] for _ in range(count)],
        "prompt (long lists)": lambda count: [[3] * 100 for _ in range(count)],
    }
    found += [Case("completions", field, _placed(BASES["completions"], "prompt", g)) for field, g in prompts.items()]
    return found
