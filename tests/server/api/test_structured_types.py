"""Types of pydantic in the openai client, and what is served of schemas at each endpoint."""

from __future__ import annotations

import json
import re
import uuid
from collections import deque
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import httpx
import openai
import pytest
from api_model import NO_THOUGHTS
from pydantic import (
    UUID4,
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ByteSize,
    Field,
    HttpUrl,
    IPvAnyAddress,
    Json,
    NonNegativeFloat,
    PositiveInt,
    SecretBytes,
    SecretStr,
    create_model,
)
from typing_extensions import TypedDict

from support.running_server import RunningServer

ID = 1234567890123456789


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = ID


class Point(NamedTuple):
    x: int
    y: int


class Options(TypedDict):
    a: int
    b: str


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(BaseModel):
    id: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
    left: Tree | None = None


UNIQUE, FORMAT, NAMES = "uniqueItems", "format", "propertyNames"
TYPES: dict[str, tuple[Any, str]] = {
    "str": (str, ""),
    "int": (int, ""),
    "float": (float, ""),
    "bool": (bool, ""),
    "int | None": (int | None, ""),
    "Literal": (Literal["a", 2, ID], ""),
    "Enum": (Colour, ""),
    "IntEnum with a large number": (Level, ""),
    "list[int]": (list[int], ""),
    "Sequence[bool]": (Sequence[bool], ""),
    "deque[int]": (deque[int], ""),
    "set[int]": (set[int], UNIQUE),
    "frozenset[str]": (frozenset[str], UNIQUE),
    "tuple[int, str]": (tuple[int, str], ""),
    "tuple[int, ...]": (tuple[int, ...], ""),
    "NamedTuple": (Point, ""),
    "TypedDict": (Options, ""),
    "dict[str, int]": (dict[str, int], ""),
    "dict[UUID, int]": (dict[uuid.UUID, int], NAMES),
    "dict[int, str]": (dict[int, str], ""),
    "dict[Colour, bool]": (dict[Colour, bool], NAMES),
    "UUID": (uuid.UUID, ""),
    "UUID4": (UUID4, FORMAT),
    "datetime": (datetime, ""),
    "AwareDatetime": (AwareDatetime, ""),
    "date": (date, ""),
    "time": (time, ""),
    "timedelta": (timedelta, ""),
    "Decimal": (Decimal, ""),
    "bytes": (bytes, FORMAT),
    "Base64Bytes": (Base64Bytes, FORMAT),
    "Path": (Path, FORMAT),
    "SecretStr": (SecretStr, FORMAT),
    "SecretBytes": (SecretBytes, FORMAT),
    "AnyUrl": (AnyUrl, ""),
    "HttpUrl": (HttpUrl, ""),
    "IPv4Address": (IPv4Address, ""),
    "IPv6Address": (IPv6Address, ""),
    "IPvAnyAddress": (IPvAnyAddress, FORMAT),
    "IPv4Network": (IPv4Network, FORMAT),
    "re.Pattern": (re.Pattern[str], FORMAT),
    "a pattern": (Annotated[str, Field(pattern=r"^[a-c]{1,4}$")], ""),
    "PositiveInt": (PositiveInt, ""),
    "NonNegativeFloat": (NonNegativeFloat, ""),
    "int64": (Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)], ""),
    "multiples": (Annotated[int, Field(multiple_of=5, ge=0, le=100)], ""),
    "complex": (complex, ""),
    "ByteSize": (ByteSize, ""),
    "Json": (Json[Any], ""),
    "Any": (Any, ""),
    "a nested class": (Cat, ""),
    "a recursive class": (Tree, ""),
    "a union": (Cat | Dog | None, ""),
    "a union with a discriminator": (Annotated[Cat | Dog, Field(discriminator="kind")], ""),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "a look-ahead": (Annotated[str, Field(json_schema_extra={"pattern": "^(?=a)a$"})], "look"),
    "two options of oneOf": (
        Annotated[int, Field(json_schema_extra={"oneOf": [{"minimum": 1}, {"minimum": 2}]})],
        "oneOf",
    ),
}


def test_types_of_pydantic_are_served_or_refused_with_the_reason(api_server: RunningServer) -> None:
    with api_server.client() as client:
        served: dict[str, Any] = {}
        for name, (kind, _) in (TYPES | REFUSED).items():
            try:
                answer = client.chat.completions.with_raw_response.parse(
                    model="tiny",
                    messages=[{"role": "user", "content": "a"}],
                    response_format=create_model("Answer", value=(kind, ...)),
                    max_tokens=24,
                    seed=1,
                )
            except openai.BadRequestError as error:
                served[name] = str(error)
                continue
            served[name] = answer.headers.get("x-chairlift-ignored", "").rpartition(".")[2]
    assert {name: served[name] for name in TYPES} == {name: keyword for name, (_, keyword) in TYPES.items()}
    for name, (_, reason) in REFUSED.items():
        assert "response_format: its schema" in served[name], name
        assert reason in served[name], name


def test_an_answer_with_a_large_number_is_parsed(api_server: RunningServer) -> None:
    answer = create_model(
        "Answer", level=(Level, ...), ids=(Annotated[list[Literal[ID, ID + 1]], Field(max_length=2)], ...)
    )
    with api_server.client() as client:
        for seed in range(3):
            chat = client.chat.completions.parse(
                model="tiny",
                messages=[{"role": "user", "content": "a"}],
                response_format=answer,
                seed=seed,
                extra_body=NO_THOUGHTS,
            )
            assert isinstance(chat.choices[0].message.parsed, answer)


SCHEMA = {
    "$schema": "https://json.example.org/unknown",
    "type": "object",
    "properties": {
        "id": {"enum": [ID, ID + 1]},
        "s": {"type": "string", "minLength": 1.0, "maxLength": 2.0, "format": "path"},
    },
    "required": ["id", "s"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
FORMAT_FIELD = {"type": "json_schema", "name": "n", "schema": SCHEMA}
ENDPOINTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        "response_format",
    ),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format"),
    (
        "chat/completions",
        {
            **CHAT,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
            "tool_choice": "required",
        },
        "tools.f",
    ),
    (
        "completions",
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        "response_format",
    ),
    ("responses", {"input": "a", "text": {"format": FORMAT_FIELD}}, "text"),
    ("responses", {"input": "a", "tools": [TOOL], "tool_choice": "required"}, "tools.f"),
    ("messages", {**CHAT, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_config"),
    ("messages", {**CHAT, "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}, "tools.f"),
]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_large_numbers_reach_the_grammar_of_each_endpoint(api_server: RunningServer, is_streamed: bool) -> None:
    for path, fields, field in ENDPOINTS:
        limit = {"max_output_tokens" if path == "responses" else "max_tokens": 200}
        body = {"model": "tiny", **fields, **limit, "seed": 1, "stream": is_streamed}
        body |= {"completions": {}, "messages": {"thinking": {"type": "disabled"}}}.get(path, NO_THOUGHTS)
        answer = httpx.post(f"{api_server.url}/v1/{path}", json=body, timeout=60)
        assert answer.status_code == 200, (path, answer.text)
        numbers = re.findall(r"\b\d{16,}\b", answer.text.replace("\\", ""))  # No part of an id.
        if not is_streamed:
            assert {int(number) for number in numbers} <= {ID, ID + 1}, (path, answer.text)
            assert numbers, (path, answer.text)
        names = answer.headers["x-chairlift-ignored"].split(", ")
        assert {f"{field}.$schema", f"{field}.properties.s.format"} <= set(names), (path, names)


def test_structured_outputs_keep_large_numbers(api_server: RunningServer) -> None:
    schema = {key: value for key, value in SCHEMA.items() if key != "properties"} | {
        "properties": {"id": {"const": ID}, "s": {"type": "integer", "minimum": ID, "maximum": ID + 1}}
    }
    for given in (schema, json.dumps(schema)):
        body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "structured_outputs": {"json": given}}
        answer = httpx.post(f"{api_server.url}/v1/completions", json=body, timeout=60)
        value = json.loads(answer.json()["choices"][0]["text"])
        assert (value["id"], value["s"] - ID in (0, 1)) == (ID, True)
        assert answer.headers["x-chairlift-ignored"] == "structured_outputs.$schema"
