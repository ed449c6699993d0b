"""Numbers that llguidance would round are exact in an answer, or the schema is refused."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import RequestError
from chairlift.grammar.compiler import CompiledGrammar, GrammarCompiler, num_words
from chairlift.grammar.grammar_text import JSON_OPTIONS
from chairlift.grammar.merged_schema import merged
from chairlift.loading.text.hf_tokenizer import folder_tokenizer
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.structured_outputs import StructuredOutputs
from support.byte_tokenizer import write_byte_tokenizer
from support.case_loop import loop_over
from support.grammar_samples import sample_text
from support.random_integer_schemas import INT64, UINT64, random_integer_schema

VOCAB_SIZE, EOS = 450, 2
SPACES: list[dict[str, Any]] = [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": r"[ \n]{0,2}"}]
ID = 1234567890123456789
NODE = {
    "type": "object",
    "properties": {
        "id": INT64,
        "next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
        "s": {"$ref": "#/$defs/S"},
    },
    "required": ["id", "next"],
    "additionalProperties": False,
}
CYCLE = {"type": "object", "properties": {"b": {"$ref": "#/$defs/B"}, "n": {"type": "integer", "maximum": ID}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return folder_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS], 20.0)
    compiler.has_checker = False
    return compiler


def accepts(grammar: CompiledGrammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is an answer. One path of tokens to each place is tried, because the text decides what follows."""
    paths: dict[int, list[int]] = {0: []}
    spelled = text.encode()
    for at in range(len(spelled) + 1):
        if at not in paths:
            continue
        matcher = grammar.matcher()
        matcher.advance(paths[at])
        bits = np.zeros(num_words(VOCAB_SIZE), np.uint32)
        matcher.fill(bits)
        for token in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist():
            if token == EOS:
                if at == len(spelled):
                    return True
            elif (piece := tokenizer.token_bytes(token)) and spelled.startswith(piece, at):
                paths.setdefault(at + len(piece), [*paths[at], token])
    return False


GOOD_AND_BAD: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "const": ({"const": ID}, [ID], [ID - 21, ID + 1]),
    "enum of several types": (
        {"enum": [ID, "a", None, 1.5, [ID], {"k": ID}]},
        [ID, "a", None, 1.5, [ID], {"k": ID}],
        [ID + 1, [ID + 1], {"k": 1}],
    ),
    "int64": (INT64, [-(1 << 63), (1 << 63) - 1, 0], [-(1 << 63) - 1, 1 << 63]),
    "uint64": (UINT64, [(1 << 64) - 1, 0], [1 << 64, -1]),
    "exclusive bounds": (
        {"type": "integer", "exclusiveMinimum": 1 << 53, "exclusiveMaximum": (1 << 53) + 3},
        [(1 << 53) + 1, (1 << 53) + 2],
        [1 << 53, (1 << 53) + 3],
    ),
    "equal bounds": ({"type": "integer", "minimum": 0, "exclusiveMinimum": 0, "maximum": ID}, [1, ID], [0]),
    "exclusive bounds of draft 4": (
        {"type": "integer", "minimum": 1 << 53, "exclusiveMinimum": True},
        [(1 << 53) + 1],
        [1 << 53],
    ),
    "numbers": (
        {"type": "number", "minimum": 0.5, "maximum": (1 << 60) + 1},
        [0.5, 7.25, (1 << 60) + 1],
        [0.25, (1 << 60) + 2],
    ),
    "multiples": ({"type": "integer", "multipleOf": ID, "minimum": 1, "maximum": 3 * ID}, [ID, 3 * ID], [1, 0, ID + 1]),
    "no type": ({"maximum": ID}, [None, "a", [1], {"a": 1}, ID, -7.5], [ID + 1]),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": ID}, {"maximum": ID + 1}]}, [ID, ID + 1], [ID - 1, ID + 2]),
    "anyOf beside a type": ({"type": "integer", "anyOf": [{"const": ID}, {"maximum": 3}]}, [ID, 3], [4, ID + 1]),
    "oneOf": ({"oneOf": [{"const": ID}, {"const": ID + 1}]}, [ID, ID + 1], [ID + 2]),
    "enum beside bounds": ({"type": "integer", "enum": [ID, 1 << 54], "minimum": 1 << 58}, [ID], [1 << 54]),
    "exponents": ({"const": 1e19}, [10**19], [10**18]),
    "recursion": (
        {"$defs": {"N": NODE, "S": {"type": "array", "items": {"$ref": "#/$defs/T"}}, "T": {"type": "null"}}, **NODE},
        [{"id": 1, "next": {"id": 2, "next": None}, "s": [None]}],
        [{"id": 1, "next": 5}, {"id": 1, "next": None, "s": [1]}],
    ),
    "a number in a cycle of references": (
        {"$defs": {"A": CYCLE, "B": {"properties": {"a": {"$ref": "#/$defs/A"}}}}, "$ref": "#/$defs/A"},
        [{"b": {"a": {"n": ID}}}],
        [{"b": {"a": {"n": ID + 1}}}],
    ),
    "other properties": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"], "additionalProperties": INT64},
        [{"a": None, "b": 1, "c": (1 << 63) - 1}, {"b": 1}],
        [{"b": "x"}, {"a": None}, {"a": 1, "b": 1}],
    ),
    "equal annotations": ({"allOf": [{"default": None}, {"const": ID, "default": None}]}, [ID], []),
    "many optional items": ({"type": "array", "prefixItems": [{"const": ID}] * 40}, [[], [ID], [ID] * 40], [[1]]),
    "lists": (
        {"type": "array", "prefixItems": [{"const": ID}], "items": {"type": "null"}, "minItems": 1, "maxItems": 3},
        [[ID], [ID, None, None]],
        [[], [1], [ID, ID], [ID, None, None, None]],
    ),
}


@loop_over(("name", "schema", "good", "bad"), [(name, *case) for name, case in GOOD_AND_BAD.items()])
def test_large_numbers_are_exact(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, schema: Any, good: list[Any], bad: list[Any]
) -> None:
    rule = f"start: %json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"
    for constraint in (StructuredOutputs(json=json.dumps(schema)), StructuredOutputs(grammar=rule)):
        grammar = compiler.compile(constraint)
        for value in good:
            assert accepts(grammar, tokenizer, json.dumps(value)), (name, value)
        for value in bad:
            assert not accepts(grammar, tokenizer, json.dumps(value)), (name, value)


REFUSED = {
    "a float that may be another integer": ({"const": float((1 << 53) + 2)}, "without a fraction"),
    "names by a pattern": ({"patternProperties": {"^a": {"const": ID}}}, "patternProperties"),
    "multiples without bounds": ({"type": "integer", "multipleOf": ID}, "multipleOf"),
    "no integer": ({"type": "integer", "minimum": ID, "maximum": ID - 1}, "no integer"),
    "many digits": ({"const": 10**70 + 1}, "64 are supported"),
    "an address": ({"$id": "http://a/b", "properties": {"x": {"$ref": "c"}, "y": {"const": ID}}}, "must be a path"),
    "alternatives that overlap": ({"oneOf": [{"minimum": ID}, {"type": "integer"}]}, "oneOf"),
    "multiples of 0": ({"enum": [ID], "multipleOf": 0}, "greater than 0, got 0"),
    "multiples of 0 between bounds": ({"type": "integer", "minimum": 0, "maximum": ID, "multipleOf": 0}, "multiple"),
    "an infinite bound": ({"type": "integer", "minimum": ID, "maximum": math.inf}, "the number inf"),
    "an infinite count": ({"items": {"const": ID}, "minItems": math.inf}, "infinity"),
    "no options": ({"x-guidance": 1}, "x-guidance must be an object"),
    "no separator": ({"x-guidance": {"item_separator": 5}, "const": ID}, "not valid"),
    "patterns beside other names": (
        {
            "allOf": [
                {"maximum": ID, "properties": {"a": {}}},
                {"maximum": 5, "patternProperties": {"^a": {"type": "null"}}},
            ]
        },
        "patternProperties cannot be combined with properties",
    ),
    "patterns beside no other names": (
        {"allOf": [{"maximum": ID, "additionalProperties": False}, {"maximum": 5, "patternProperties": {"^a": {}}}]},
        "patternProperties cannot be combined with properties",
    ),
    "items beside other items": (
        {"allOf": [{"maximum": ID, "items": [{}]}, {"maximum": 5, "additionalItems": False}]},
        "additionalItems cannot be combined with items",
    ),
    "many merged parts": (
        {"maximum": ID, "allOf": [{"properties": {f"{index:030}": {}}} for index in range(1000)]},
        "repeated parts",
    ),
    "no schema": ({"properties": {"a": {"const": ID}, "b": 5}}, "schema"),
}


@loop_over(("name", "schema", "reason"), [(name, *case) for name, case in REFUSED.items()])
def test_a_number_that_cannot_be_exact_is_refused(
    compiler: GrammarCompiler, name: str, schema: Any, reason: str
) -> None:
    text = json.dumps(schema).replace("Infinity", "1e400")
    constraints = [StructuredOutputs(grammar=f"start: %json {text}")]
    constraints += [] if "1e400" in text or "x-guidance" in text else [StructuredOutputs(json=text)]
    for constraint in constraints:
        with pytest.raises(RequestError, match=reason):
            compiler.compile(constraint)


def test_keywords_with_many_values_are_merged_in_linear_time() -> None:
    num_compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    for key in ("required", "enum"):
        merged(*({key: [Name(f"{side}{index}") for index in range(1000)]} for side in "ab"))
    assert num_compared < 10_000


def test_a_bound_that_cannot_be_exact_is_narrower(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "patternProperties": {"^a$": INT64}, "additionalProperties": False}
    grammar = compiler.compile(StructuredOutputs(json=schema))
    largest = (1 << 63) - 1024
    for value, is_accepted in ((largest, True), (-largest, True), (largest + 1, False), (-largest - 1, False)):
        assert accepts(grammar, tokenizer, json.dumps({"a": value})) == is_accepted, value


def test_answers_satisfy_random_schemas_with_large_integers(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    rng, refused, num_answers = random.Random(0), [], 0
    for seed in range(200):
        schema = random_integer_schema(seed)
        options: dict[str, Any] = [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": r"[ \n]{0,2}"}][
            seed % 3
        ]
        try:
            grammar = compiler.compile(StructuredOutputs(json=schema, **options))
        except RequestError as error:
            refused.append((seed, str(error)))
            continue
        for _ in range(3):
            text = sample_text(grammar, tokenizer, EOS, rng)
            if text is not None:
                num_answers += 1
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert num_answers > 400
    assert len(refused) < 60, refused


@given(st.data())
def test_a_random_integer_is_accepted_as_jsonschema_does(
    compiler: GrammarCompiler, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    numbers = st.integers(-(1 << 65), 1 << 65) | st.sampled_from([-1, 0, 1, -(1 << 53), 1 << 53])
    names = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
    schema = {"type": data.draw(st.sampled_from(["integer", "number"]))}
    schema |= data.draw(st.dictionaries(st.sampled_from(names), numbers, min_size=1, max_size=3))
    bounds = [value for value in schema.values() if isinstance(value, int)]
    number = data.draw(numbers | st.sampled_from([bound + step for bound in bounds for step in (-1, 0, 1)]))
    is_valid = jsonschema.Draft202012Validator(schema).is_valid(number)
    try:
        grammar = compiler.compile(StructuredOutputs(json=schema))
    except RequestError:
        assert not is_valid
        return
    assert accepts(grammar, tokenizer, str(number)) == is_valid
