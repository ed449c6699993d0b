from __future__ import annotations

import inspect
from enum import IntEnum
from typing import Any

import msgspec
import pytest

from chairlift import SamplingParams, StructuredOutputs
from chairlift.errors import RequestError
from chairlift.structured_outputs import MAX_CHOICES, MAX_REGEX_BYTES, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


LOOP: dict[str, Any] = {}
LOOP["items"] = LOOP

REJECTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({}, "structured_outputs", "exactly one of json, regex, choice, grammar, json_object, got none"),
    "two": ({"json": {}, "regex": "a"}, "structured_outputs", "got json and regex"),
    "not JSON": ({"json": '{"a": '}, "structured_outputs.json", "is not JSON"),
    "NaN": ({"json": '{"const": NaN}'}, "structured_outputs.json", "NaN"),
    "infinity": ({"json": {"const": float("inf")}}, "structured_outputs.json", "is not JSON"),
    "no schema": ({"json": "[]"}, "structured_outputs.json", "must be a JSON schema"),
    "no JSON value": ({"json": {"const": {1, 2}}}, "structured_outputs.json", "is not JSON"),
    "a loop": ({"json": LOOP}, "structured_outputs.json", "is not JSON|levels"),
    "deep": ({"json": nested(MAX_SCHEMA_DEPTH + 1)}, "structured_outputs.json", f"at most {MAX_SCHEMA_DEPTH}"),
    "deep text": ({"json": "[" * 100_000}, "structured_outputs.json", f"at most {MAX_SCHEMA_DEPTH}"),
    "very deep": ({"json": nested(5000)}, "structured_outputs.json", "levels"),
    "large": ({"json": {"const": "x" * MAX_SCHEMA_BYTES}}, "structured_outputs.json", f"at most {MAX_SCHEMA_BYTES}"),
    "long regex": ({"regex": "é" * MAX_REGEX_BYTES}, "structured_outputs.regex", f"at most {MAX_REGEX_BYTES}"),
    "empty regex": ({"regex": ""}, "structured_outputs.regex", "not empty"),
    "half a character": ({"regex": "\ud800"}, "structured_outputs.regex", "not valid Unicode"),
    "no choice": ({"choice": []}, "structured_outputs.choice", "at least one string"),
    "a string of choices": ({"choice": "ab"}, "structured_outputs.choice", "must be a list"),
    "an empty choice": ({"choice": ["a", ""]}, "structured_outputs.choice", "not empty"),
    "many choices": ({"choice": ["a"] * (MAX_CHOICES + 1)}, "structured_outputs.choice", f"at most {MAX_CHOICES}"),
    "long choices": ({"choice": ["a" * 60_000, "b" * 60_000]}, "structured_outputs.choice", "in total"),
    "white space of a regex": (
        {"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern", "needs json"
    ),
    "compact choices": (
        {"choice": ["a"], "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace", "needs json"
    ),
    "both white spaces": (
        {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
        "structured_outputs.whitespace_pattern",
        "cannot be combined",
    ),
    "not a record": ({"regex": "a", "reasoning": "<think>"}, "structured_outputs.reasoning", "a Reasoning record"),
    "not a flag": ({"json_object": 1}, "structured_outputs.json_object", "true or false"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_errors_name_the_field_and_the_limit(name: str) -> None:
    fields, param, reason = REJECTED[name]
    with pytest.raises(RequestError, match=reason) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == param


CONSTRAINTS = [
    StructuredOutputs(json={"type": "object", "properties": {"b": {"const": "é]"}, "a": {}}}),
    StructuredOutputs(json='{"enum": ["[[[["]}', whitespace_pattern=r"\s"),
    StructuredOutputs(regex="a|b"),
    StructuredOutputs(choice=["a", "b"]),
    StructuredOutputs(grammar='start: "a"'),
    StructuredOutputs(json_object=True, disable_any_whitespace=True),
]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: constraint.kind)
def test_a_constraint_can_be_serialized_and_is_a_dict_key(constraint: StructuredOutputs) -> None:
    params = SamplingParams(structured_outputs=constraint)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert {constraint: 1}[msgspec.json.decode(msgspec.json.encode(constraint), type=StructuredOutputs)] == 1


def test_a_schema_is_equal_to_its_text_and_keeps_its_order() -> None:
    schema = {"properties": {"z": {}, "a": {}}}
    assert StructuredOutputs(json=schema) == StructuredOutputs(json=' {"properties": {"z": {}, "a": {} } }')
    assert StructuredOutputs(json=schema) != StructuredOutputs(json={"properties": {"a": {}, "z": {}}})
    assert StructuredOutputs(json=nested(MAX_SCHEMA_DEPTH)).kind == "json"


PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "no record": ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    "ignore_eos": ({"structured_outputs": CONSTRAINTS[2], "ignore_eos": True}, "ignore_eos"),
    "bad_words": ({"structured_outputs": CONSTRAINTS[2], "bad_words": ["a"]}, "bad_words"),
    "allowed_token_ids": ({"structured_outputs": CONSTRAINTS[2], "allowed_token_ids": [1]}, "allowed_token_ids"),
    "a bad word": ({"bad_words": "ab"}, "bad_words"),
    "an empty bad word": ({"bad_words": ["a", " "]}, "bad_words"),
    "a bad word of no tokens": ({"bad_words": [[]]}, "bad_words"),
    "many bad words": ({"bad_words": ["a"] * 257}, "bad_words"),
    "nothing allowed": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "a negative token": ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    "nothing kept": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "negative": ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    "stop without text": ({"stop": "a", "detokenize": False}, "detokenize"),
    "no flag": ({"detokenize": None}, "detokenize"),
    "no token": ({"stop_token_ids": [3, "5"]}, "stop_token_ids"),
    "no field": ({"max_token": 1}, "max_token"),
}


@pytest.mark.parametrize("name", PARAMS)
def test_contradictory_parameters_are_rejected(name: str) -> None:
    fields, param = PARAMS[name]
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_token_ids_can_be_members_of_an_enumeration() -> None:
    assert SamplingParams(stop_token_ids=[IntEnum("Token", "END").END]).stop_token_ids == (1,)
    with pytest.raises(RequestError, match="stop must be a string or a list of strings, got 5"):
        SamplingParams(stop=5)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_token", r"did you mean max_tokens\?"),
        ("guided_decoding", "use structured_outputs"),
        ("best_of", "leave it out, because"),
        ("n_predict", "use max_tokens"),
        ("model", "options are n, temperature"),
        ("format", "options are n, temperature"),
        ("threads", "did you mean|options are"),
        ("x", "options are n, temperature"),
    ],
)
def test_an_unknown_parameter_is_an_error_with_advice(name: str, advice: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is not an option[:;] {advice}"):
        SamplingParams(**{name: None})
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["n", "temperature"], "for help()"
