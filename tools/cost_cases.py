"""Bodies that grow in one field: for every endpoint, each field that holds a list, a string or an object.

The fields come from the JSON schema of the endpoint's body. A case is a path through that schema; `Case.body(size)` is
a body of about `size` bytes, valid or not, in which the value at the path is large and everything else is minimal.
The large value is made as JSON text: the text of one item is repeated, and no item exists as a Python object.

A case may be multiplied: its body also asks for many answers, each of which needs what the large value says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from chairlift.sampling_params import MAX_BEAMS, MAX_N
from chairlift.server.api.tokenization import DetokenizeRequest, TokenizeRequest
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.completions import CompletionRequest
from chairlift.server.protocol.messages import CountTokensRequest, MessagesRequest
from chairlift.server.protocol.responses import ResponsesRequest

MAX_RATIO: Final = 2.6
"""The largest growth of a cost at a doubling of the size."""

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
"""Short name -> path of the endpoint."""

BODY_TYPES: Final[dict[str, type[BaseModel]]] = {
    "completions": CompletionRequest,
    "chat": ChatCompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "count_tokens": CountTokensRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}

BASES: Final[dict[str, dict[str, Any]]] = {
    "completions": {"prompt": "x", "max_tokens": 1},
    "chat": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "responses": {"input": "x", "max_output_tokens": 1},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "tokenize": {"prompt": "x"},
    "detokenize": {"tokens": [3]},
}


@dataclass(frozen=True, slots=True)
class Multiplier:
    """A way to ask for many answers in one call.

    Attributes:
        fields: number of answers -> the fields of the body.
        endpoints: keys of `PATHS` whose bodies have these fields.
        max_answers: the largest number of answers that one call may ask for in this way here.
    """

    fields: Callable[[int], dict[str, Any]]
    endpoints: tuple[str, ...]
    max_answers: int


NUM_PROMPTS: Final = 16
MULTIPLIERS: Final = {
    "n": Multiplier(lambda answers: {"n": answers}, ("completions", "chat"), MAX_N),
    "16 prompts x n": Multiplier(
        lambda answers: {"prompt": [f"{index} x" for index in range(NUM_PROMPTS)], "n": answers // NUM_PROMPTS},
        ("completions",),
        NUM_PROMPTS * MAX_N,
    ),
    "beams": Multiplier(lambda answers: {"n": answers, "use_beam_search": True}, ("completions", "chat"), MAX_BEAMS),
}

NUMBERED: Final = ("name", "id", "call_id", "tool_call_id")
"""Strings that differ from item to item, so that checks for repeated names have something to compare."""

NUMBER: Final = "\ue000"
"""Placeholder in the text of an item; `items` replaces it with a number of its own for each item."""

BLOCK: Final = 1000
"""Number of items that `items` makes at a time: those that differ only in the last three digits of their numbers."""

Grow = Callable[[int], str]
"""Number of items -> the JSON text of a value."""


@dataclass(frozen=True, slots=True)
class Case:
    """One field of one endpoint.

    Attributes:
        endpoint: a key of `PATHS`.
        field: the path of the field, as in `messages[].content`.
        make: number of items -> the JSON text of the body.
        multiplier: a key of `MULTIPLIERS`, or empty for one answer.
    """

    endpoint: str
    field: str
    make: Grow
    multiplier: str = ""

    @property
    def name(self) -> str:
        """The field with its endpoint and multiplier."""
        return f"{self.endpoint}: {self.field}" + (f", {self.multiplier}" if self.multiplier else "")

    def body(self, size: int) -> bytes:
        """A body of at most `size` bytes, and nearly as many."""
        few, more = (len(self.make(count)) for count in (64, 128))
        count = max(1, 64 + int((size - few) * 64 / max(1, more - few)))
        content = self.make(count).encode()
        while len(content) > size and count > 1:
            count = int(count * size / len(content) * 0.998)
            content = self.make(count).encode()
        return content


def items(text: str, count: int, separator: str = ",") -> str:
    """The JSON text of `count` items; `NUMBER` in `text` becomes 1000 in the first item, 1001 in the second one."""
    if NUMBER not in text:
        return separator.join([text] * count)
    block = [text.replace(NUMBER, f"{NUMBER}{n:03}") for n in range(BLOCK)]
    whole = separator.join(block)
    num_whole, rest = divmod(count, BLOCK)
    blocks = [*([whole] * num_whole), *([separator.join(block[:rest])] if rest else [])]
    return separator.join(part.replace(NUMBER, str(n)) for n, part in enumerate(blocks, 1))


def _encoded(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _object(fields: dict[str, Any], name: str, text: str) -> str:
    """The JSON text of an object: its fields, and one more (or one of them replaced) that is JSON text already."""
    others = [f"{_encoded(key)}:{_encoded(value)}" for key, value in fields.items() if key != name]
    return "{" + ",".join([*others, f"{_encoded(name)}:{text}"]) + "}"


def all_cases() -> list[Case]:
    """The cases of all endpoints with one answer."""
    return _cases(BASES, "")


def multiplied_cases(multiplier: str, answers: int) -> list[Case]:
    """The cases of a key of `MULTIPLIERS` whose bodies ask for this number of answers.

    A field that is itself among the multiplier's fields is left out.
    """
    how = MULTIPLIERS[multiplier]
    fields = how.fields(answers)
    bases = {endpoint: {**BASES[endpoint], **fields} for endpoint in how.endpoints}
    return [case for case in _cases(bases, multiplier) if re.split(r"\W", case.field)[0] not in fields]


def _cases(bases: dict[str, dict[str, Any]], multiplier: str) -> list[Case]:
    cases = []
    for endpoint, base in bases.items():
        schema = BODY_TYPES[endpoint].model_json_schema()
        for name, field in schema["properties"].items():
            for path, grow in _growing(field, schema.get("$defs", {}), name, 0):
                cases.append(Case(endpoint, path, _placed(base, name, grow), multiplier))
        cases += [Case(endpoint, field, make, multiplier) for field, make in _extra(endpoint, base).items()]
    return cases


def _placed(base: dict[str, Any], name: str, grow: Grow) -> Grow:
    # /tokenize takes either a prompt or messages, and fields of messages only beside these.
    return _grown({key: value for key, value in base.items() if (key, name) != ("prompt", "messages")}, name, grow)


def _list_of(text: str) -> Grow:
    return lambda count: f"[{items(text, count)}]"


def _list_around(grow: Grow) -> Grow:
    return lambda count: f"[{grow(count)}]"


def _grown(minimal: dict[str, Any], name: str, grow: Grow) -> Grow:
    return lambda count: _object(minimal, name, grow(count))


def _growing(schema: dict[str, Any], definitions: dict[str, Any], path: str, depth: int) -> Iterator[tuple[str, Grow]]:
    """Each way in which a value of this schema can be large."""
    for form in _forms(schema, definitions):
        kind = form.get("type")
        if kind == "string" and "const" not in form and "enum" not in form:
            yield f"{path} (string)", lambda count: '"' + "x " * (count // 2) + '"'
        elif kind == "array":
            item = form.get("items", {})
            text = _encoded(example(item, definitions, NUMBER))
            yield f"{path}[]", _list_of(text)
            if depth < MAX_DEPTH:
                for inner, grow in _growing(item, definitions, f"{path}[]", depth + 1):
                    yield inner, _list_around(grow)
        elif kind == "object" and "properties" in form:
            yield from _growing_in_object(form, definitions, path, depth)
        elif kind == "object" or kind is None:
            yield f"{path} (object)", lambda count: "{" + items(f'"k{NUMBER}":{NUMBER}', count) + "}"
            yield f"{path} (lists)", lambda count: '{"k":[' + items("[]", count) + "]}"


def _growing_in_object(
    form: dict[str, Any], definitions: dict[str, Any], path: str, depth: int
) -> Iterator[tuple[str, Grow]]:
    if depth >= MAX_DEPTH:
        return
    minimal = example(form, definitions, "0")
    for name, field in form["properties"].items():
        for inner, grow in _growing(field, definitions, f"{path}.{name}", depth + 1):
            yield inner, _grown(minimal, name, grow)


def _forms(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The alternatives of a schema, without references and null."""
    if "$ref" in schema:
        yield from _forms(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    elif alternatives := schema.get("anyOf", schema.get("oneOf")):
        for alternative in alternatives:
            yield from _forms(alternative, definitions)
    elif schema.get("type") != "null":
        yield schema


def example(schema: dict[str, Any], definitions: dict[str, Any], number: str, name: str = "") -> Any:
    """A small valid value of a schema; strings that identify something contain `number`."""
    null: dict[str, Any] = {"type": "null"}
    form = next(_forms(schema, definitions), null)
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


def _extra(endpoint: str, base: dict[str, Any]) -> dict[str, Grow]:
    """Values whose cost is not that of their size: patterns, schemas, escapes, spellings of special tokens."""
    if endpoint == "completions":
        return _extra_prompts(base)
    return _extra_of_chat(base) if endpoint == "chat" else {}


def _extra_prompts(base: dict[str, Any]) -> dict[str, Grow]:
    prompts: dict[str, Grow] = {
        "prompt (token ids)": lambda count: f"[{items('3', count)}]",
        "prompt (lists of token ids)": lambda count: f"[{items('[3]', count)}]",
        "prompt (long lists)": lambda count: f"[{items(_encoded([3] * 100), count)}]",
    }
    return {field: _placed(base, "prompt", grow) for field, grow in prompts.items()}


def _extra_of_chat(base: dict[str, Any]) -> dict[str, Grow]:
    def in_chat(field: str, grow: Grow) -> Grow:
        return lambda count: _object(base, field, grow(count))

    def content(text: Callable[[int], str]) -> Grow:
        return in_chat("messages", lambda count: _encoded([{"role": "user", "content": text(count)}]))

    def structured(name: str, grow: Grow) -> Grow:
        return in_chat("structured_outputs", lambda count: _object({}, name, grow(count)))

    def properties(count: int) -> str:
        texts = items(f'"p{NUMBER}":{{"type":"string"}}', count)
        return f'{{"type":"object","properties":{{{texts}}}}}'

    def tool(count: int) -> str:
        return f'[{{"type":"function","function":{{"name":"f","parameters":{properties(count)}}}}}]'

    turns = '{"role":"user","content":"x"},{"role":"assistant","content":"x"}'
    result = f'{{"role":"tool","content":"x","tool_call_id":"n{NUMBER}"}}'
    unknown = f'"x{NUMBER}":1'
    return {
        "messages (special tokens)": content(lambda count: "<|im_end|>" * (count // 10)),
        "messages (escapes)": content(lambda count: "\x01" * (count // 6)),
        "messages (one letter)": content(lambda count: "a" * count),
        "messages (two roles)": in_chat("messages", lambda count: f"[{items(turns, max(1, count // 2))}]"),
        "messages (tool results)": in_chat("messages", lambda count: f"[{items(result, count)}]"),
        "structured_outputs.regex (repetition)": structured("regex", lambda count: f'"a{{{count}}}"'),
        "structured_outputs.regex (alternatives)": structured(
            "regex", lambda count: '"' + items(f"x{NUMBER}", count, "|") + '"'
        ),
        "structured_outputs.json (properties)": structured("json", properties),
        "structured_outputs.json (enum)": structured(
            "json", lambda count: '{"enum":[' + items(f'"v{NUMBER}"', count) + "]}"
        ),
        "tools (schema)": in_chat("tools", tool),
        "unknown field": lambda count: _object(base, "x" * count, "1"),
        "unknown fields": lambda count: f"{_encoded(base)[:-1]},{items(unknown, count)}}}",
    }
