"""Calls that a grammar permits follow the schemas of their tools, or what is not followed is named."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from chairlift.errors import RequestError
from chairlift.grammar.compiler import CompiledGrammar, GrammarCompiler, num_words
from chairlift.grammar.followed_schema import SCHEMA_LISTS, SCHEMA_MAPS, UNFOLLOWED, FollowedSchema
from chairlift.grammar.grammar_text import marker_symbol
from chairlift.loading.text.hf_tokenizer import folder_tokenizer
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.server.protocol.tools import FunctionTool
from chairlift.server.tools.answer_formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from chairlift.server.tools.answer_parser import AnswerParser, DeltaMessage
from chairlift.server.tools.channel_parser import ChannelParser
from chairlift.server.tools.tool_constraints import TEXT, CallGrammar
from chairlift.server.tools.tool_parser import ToolParser
from chairlift.structured_outputs import StructuredOutputs
from support.byte_tokenizer import write_byte_tokenizer
from support.grammar_samples import sample_text
from support.random_tool_schemas import random_tool_schema

DIALECT = jsonschema.Draft202012Validator
HEADER = " to=functions.f<|channel|>commentary json<|message|>"
EOS, VOCAB_SIZE, NUM_SCHEMAS = 2, 450, 500


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return folder_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])
    compiler.has_checker = False
    return compiler


def tool(parameters: dict[str, Any], name: str = "f", strict: bool = False) -> FunctionTool:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return FunctionTool.model_validate({"type": "function", "function": function})


def compiled(compiler: GrammarCompiler, *tools: FunctionTool, named: bool = True) -> tuple[CompiledGrammar, list[str]]:
    """The grammar of a forced call, and the names of what it does not follow."""
    calls = CallGrammar(list(tools), is_parallel=False)
    grammar = compiler.compile(StructuredOutputs(calls=calls.arguments() if named else calls.json_list()))
    return grammar, [*calls.ignored, *grammar.ignored]


def keywords(error: jsonschema.ValidationError) -> Iterator[str]:
    yield from map(str, error.absolute_schema_path)
    for cause in error.context or ():
        yield from keywords(cause)


def test_forced_calls_follow_random_schemas_or_the_relaxed_keywords_are_named(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    num_sampled = num_relaxed = 0
    for seed in range(NUM_SCHEMAS):
        schema = random_tool_schema(seed)
        grammar, ignored = compiled(compiler, tool(schema))
        text = sample_text(grammar, tokenizer, EOS, random.Random(seed))
        if text is None:
            continue
        num_sampled += 1
        num_relaxed += bool(ignored)
        value = json.loads(text)
        assert isinstance(value, dict)
        if any(name.endswith(("$ref", ".type", ".parameters")) for name in ignored):
            continue  # jsonschema cannot read it, or nothing but an object is promised.
        dialect = {key: value for key, value in schema.items() if key != "$schema"}
        for error in DIALECT(dialect, format_checker=DIALECT.FORMAT_CHECKER).iter_errors(value):
            named = [key for key in keywords(error) if any(name.endswith(f".{key}") for name in ignored)]
            assert named, (seed, schema, text, error.message, ignored)
    assert num_sampled > 0.95 * NUM_SCHEMAS
    assert num_relaxed > 0.5 * NUM_SCHEMAS


def test_values_that_look_like_references_are_followed_as_they_are(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    value = {"$ref": "#/a/b", "items": {"$id": "x", "format": "url", "description": "kept"}}
    other = {"type": "object", "properties": {"q": {"$ref": "#/$defs/q"}}, "$defs": {"q": {"type": "null"}}}
    for part in ({"enum": [value]}, {"const": value}):
        schema = {"properties": {"u": part}, "required": ["u"], "additionalProperties": False}
        grammar, ignored = compiled(compiler, tool(schema))
        assert json.loads(sample_text(grammar, tokenizer, EOS, random.Random(1)) or "") == {"u": value}
        grammar, ignored = compiled(compiler, tool(schema, "f"), tool(other, "g"), named=False)
        calls = [json.loads(sample_text(grammar, tokenizer, EOS, random.Random(seed)) or "")[0] for seed in range(9)]
        assert {"name": "f", "arguments": {"u": value}} in calls
        assert ignored == []


REFERENCES: dict[str, dict[str, Any]] = {
    "an id at the root": {"$id": "https://e.org/s", "$ref": "#/definitions/P"},
    "the id itself": {"$id": "https://e.org/s", "allOf": [{"$ref": "https://e.org/s#/definitions/P"}]},
    "a relative address": {
        "$id": "https://e.org/a/s",
        "$ref": "../b/t#/definitions/P",
        "$defs": {"t": {"$id": "/b/t"}},
    },
    "an anchor": {"$ref": "#here"},
    "an escaped pointer": {"$ref": "#/definitions/a~1b~0c%20d"},
    "outside of keywords": {"$ref": "#/components/schemas/P", "components": {"schemas": {"P": {"$ref": "#here"}}}},
}
TARGET = {"$anchor": "here", "type": "object", "properties": {"n": {"const": 1}}, "required": ["n"]}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_resolved_by_the_rules_of_json_schema(
    name: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    target = {**TARGET, "additionalProperties": False}
    schema = {**REFERENCES[name], "definitions": {"P": target, "a/b~c d": {"$ref": "#here"}}}
    if "$defs" in schema:
        schema["$defs"] = {"t": {"$id": "/b/t", "definitions": {"P": {**target, "$anchor": "other"}}}}
    for strict in (False, True):
        grammar, ignored = compiled(compiler, tool(schema, strict=strict))
        assert ignored == []
        assert json.loads(sample_text(grammar, tokenizer, EOS, random.Random(2)) or "") == {"n": 1}


@pytest.mark.parametrize(
    ("part", "ignored"),
    [
        ({"type": "string", "format": "url", "maxLength": 3}, ["tools.f.properties.u.format"]),
        ({"type": "array", "uniqueItems": True}, ["tools.f.properties.u.uniqueItems"]),
        ({"type": "array", "uniqueItems": False}, []),
        ({"type": "string", "pattern": "(?!a)"}, ["tools.f.properties.u.pattern"]),
        ({"$ref": "#/$defs/none"}, ["tools.f.parameters"]),
        ({"$ref": "#/properties/u"}, ["tools.f.properties.u.$ref"]),
        ({"allOf": [{"$ref": "#/properties/u"}]}, ["tools.f.properties.u.allOf.0.$ref"]),
        ({"patternProperties": {"a": {"const": 1234567890123456789}}}, ["tools.f.parameters"]),
        ({"type": "integer", "format": "int64"}, []),
        ({"enum": [1234567890123456789, "a"]}, []),
        ({"type": "array", "minItems": 1.0}, []),
        ({"type": "str"}, ["tools.f.parameters"]),
        ({"type": None, "format": "float"}, ["tools.f.parameters"]),
        ({"type": 1, "format": "double"}, ["tools.f.parameters"]),
        ({"properties": 1, "enum": 2, "pattern": 3}, ["tools.f.parameters"]),
        ({"patternProperties": {"a": {}, "(?!a)": {}}}, ["tools.f.properties.u.patternProperties"]),
        ({"type": "integer", "minimum": 2, "maximum": 1}, ["tools.f.parameters"]),
        ({"required": True, "type": "string"}, []),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["tools.oneOf"]),
        ({"type": "number", "format": "double"}, []),
        ({"default": {"format": "url"}, "enum": [{"format": "url"}]}, []),
        ({"properties": {"a\n, \u00e4": {"not": {}}}}, ["tools.f.properties.u.properties.a%0A%2C%20%C3%A4.not"]),
    ],
)
def test_what_cannot_be_followed_is_named_or_refused_if_the_tool_is_strict(
    part: dict[str, Any], ignored: list[str], compiler: GrammarCompiler
) -> None:
    schema = {"type": "object", "properties": {"u": part}, "required": ["u"]}
    assert compiled(compiler, tool({"type": "object"}, "g", strict=True), tool(schema), named=False)[1] == ignored
    if not ignored:
        assert compiled(compiler, tool(schema, strict=True))[1] == []
        return
    dialect = {"$schema": "https://example.org/unknown"}
    assert compiled(compiler, tool({"type": "object", **dialect}, strict=True))[1] == ["tools.f.$schema"]
    with pytest.raises(RequestError) as caught:
        compiled(compiler, tool(schema, strict=True))
    assert caught.value.param in ("tools", "structured_outputs.calls")


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        ({"type": "integer", "format": "int32"}, "2147483647", "2147483648"),
        ({"type": "integer", "format": "uint8", "maximum": 9}, "9", "10"),
        ({"type": "integer", "format": "int64"}, "9007199254740993", "9223372036854775808"),
        ({"type": "string", "format": "date"}, '"2026-02-28"', '"2026-13-01"'),
        ({"type": "string", "format": "time"}, '"23:59:59Z"', '"25:00:00Z"'),
        ({"type": "string", "format": "date-time"}, '"2026-02-28T01:02:03Z"', '"2026-02-28"'),
        ({"type": "string", "format": "uuid"}, '"12345678-1234-1234-1234-123456789abc"', '"12345678"'),
        ({"type": "string", "format": "email"}, '"a@example.org"', '"a"'),
        ({"type": "string", "format": "uri"}, '"https://example.org/a?b"', '"a b"'),
        ({"type": "string", "format": "ipv4"}, '"10.0.0.255"', '"10.0.0.256"'),
        ({"type": "string", "format": "ipv6"}, '"2001:db8::1"', '"2001:::1"'),
        ({"type": "string", "format": "hostname"}, '"a.example"', '"-a"'),
    ],
)
def test_common_formats_are_followed(part: dict[str, Any], good: str, bad: str) -> None:
    calls = CallGrammar([tool({"properties": {"u": part}, "required": ["u"]}, strict=True)], is_parallel=False)
    assert accepts(calls.arguments(), f'{{"u": {good}}}')
    assert not accepts(calls.arguments(), f'{{"u": {bad}}}')


def accepts(lark: str, text: str) -> bool:
    """Whether a grammar permits a text, and that it ends there."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(lark))
    assert not matcher.get_error()
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


def test_a_tool_without_parameters_has_no_arguments() -> None:
    calls = CallGrammar(
        [FunctionTool.model_validate({"type": "function", "function": {"name": "now"}})], is_parallel=False
    )
    assert accepts(calls.arguments(), "{}")
    assert not accepts(calls.arguments(), '{"a": 1}')


CALL = '{"name": "f", "arguments": {"ok": true}}'
STRICT = tool(
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False},
    strict=True,
)
IN_FORMAT = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "llama3_json": CALL.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS] [{CALL}]",
    "granite": f"<|tool_call|>[{CALL}]",
    "phi4_mini_json": f"functools[{CALL}]",
    "olmo3": f"<function_calls>{CALL}</function_calls>",
    "gemma4": f"<|tool_call>{CALL}<tool_call|>",
    "pythonic": f"```tool_code\n{CALL}\n```",
    "lfm2": f"<|tool_call_start|>[{CALL}]<|tool_call_end|>",
    "cohere_command3": '<|START_ACTION|>[{"tool_name": "f", "parameters": {"ok": true}}]<|END_ACTION|>',
    "hunyuan_a13b": f"<tool_calls>[{CALL}]</tool_calls>",
    "nemotron_json": f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    "minicpm5": f'<function name="{CALL}</function>',
    "apertus": f"<|tools_prefix|>[{CALL}]<|tools_suffix|>",
}

IN_CHANNELS = {
    "openai": f'<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HEADER}{{"ok": true}}',
    "muse_glimmer": " to=self<|message|>Hm.<|eom|><|start|>assistant to=f<|message|>"
    f"<atem:function_calls>\n{CALL}\n</atem:function_calls>",
}


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_calls_of_strict_tools_follow_the_schema_in_every_format_and_are_parsed(name: str) -> None:
    form, calls = TOOL_CALL_FORMATS[name], CallGrammar([STRICT], is_parallel=True)
    if form.channels is not None:
        text = IN_CHANNELS[name]
        grammar = calls.in_channels(form, json.dumps, "TEXT")
        free = only = grammar.replace(TEXT, "TEXT: /[^<]*/")  # It has no special tokens.
        parser: AnswerParser = ChannelParser(form, frozenset("f"))
    else:
        text = IN_FORMAT.get(name, f"{form.openings[0]}{CALL}{form.closing or ''}")
        free = calls.in_format(form, json.dumps, has_text=True)
        only = calls.in_format(form, json.dumps, has_text=False)
        parser = ToolParser(form, frozenset("f"))
        assert accepts(free, "Well, I cannot.")
        assert not accepts(only, "Well, I cannot.")
    for grammar in (free, only):
        assert accepts(grammar, text)
        assert not accepts(grammar, text.replace("true", "1"))
    answer = DeltaMessage.joined([parser.feed(text), parser.finish()])
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments), answer.content) == ("f", {"ok": True}, "")


KEYS = [
    *UNFOLLOWED,
    *SCHEMA_MAPS,
    *SCHEMA_LISTS,
    "type",
    "enum",
    "$ref",
    "$id",
    "format",
    "required",
    "minimum",
    "pattern",
]
VALUES = [None, True, 1, -1.5, 1e300, float("nan"), "#", "#/a", "#/items/0", "object", "int32", "float", "", [], {}]


def random_json(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(VALUES)
    if rng.random() < 0.3:
        return [random_json(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {rng.choice(KEYS): random_json(rng, depth - 1) for _ in range(rng.randint(1, 5))}


def test_any_json_is_reduced_to_an_object_schema() -> None:
    rng = random.Random(5)
    for _ in range(1000):
        schema = {rng.choice(KEYS): random_json(rng, 4) for _ in range(4)}
        before = json.dumps(schema)
        assert FollowedSchema(schema).schema["type"] == "object"
        assert json.dumps(schema) == before


def test_what_is_left_out_has_short_names() -> None:
    schema = {"properties": {"k" * 10_000: {"properties": {str(i): {"not": {"type": "null"}} for i in range(2)}}}}
    assert FollowedSchema(schema).left_out == [f"properties.{'k' * 89}"] * 2


XTML = '<|open|>tools<|sep|>{"name": "f", "arguments": {"ok": true}}<|close|>tools<|sep|>'
RESPONSE = "<|open|>response<|sep|>So.<|close|>response<|sep|>"
SOLAR = '<|begin|>assistant<|tool_calls|>{"name": "f", "arguments": {"ok": true}}<|calls|>'
WITH_SPECIAL = {
    "kimi_k3": (RESPONSE, RESPONSE + XTML, XTML, "So."),
    "solar_open": ("<|content|>So.<|end|>", f"<|begin|>assistant<|content|>So.<|end|>{SOLAR}", SOLAR),
    "gigachat3": ("So.", f"So.<|message_sep|>\n\nfunction call<|role_sep|>\n{CALL}<|message_sep|>"),
    "apertus": ("So.", f"So. <|tools_prefix|>[{CALL}]<|tools_suffix|>"),
    "minimax_m3": ("So.", f"]<]minimax[>[<tool_call>\n{CALL}\n]<]minimax[>[</tool_call>"),
    "muse_glimmer": (
        " to=user<|message|>So.",
        f" to=self<|message|>Hm.<|eom|><|start|>assistant to=f<|message|><atem:function_calls>\n{CALL}\n"
        "</atem:function_calls>",
    ),
}


@pytest.mark.parametrize("name", WITH_SPECIAL)
def test_calls_of_strict_tools_are_followed_between_special_tokens(name: str, tmp_path: Path) -> None:
    backend = folder_tokenizer(write_byte_tokenizer(tmp_path)).backend
    tokens = re.findall(r"<\|[\w:]+\|>|\]<\]minimax\[>\[", "".join(WITH_SPECIAL[name]))
    backend.add_special_tokens(list(dict.fromkeys(tokens)))
    tokenizer = Tokenizer(backend, special_tokens={})
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])
    compiler.has_checker = False
    form, calls = TOOL_CALL_FORMATS[name], CallGrammar([STRICT], is_parallel=True)
    symbol = partial(marker_symbol, tokenizer=tokenizer)
    special = REASONING_FORMATS[name].special if name in REASONING_FORMATS else ()
    if form.channels is not None:
        text = calls.in_channels(form, symbol, "TEXT")
    else:
        text = calls.in_format(form, symbol, True, special)
    grammar = compiler.compile(StructuredOutputs(calls=text))
    for answer in WITH_SPECIAL[name]:
        ids = tokenizer.encode(answer, add_special_tokens=False)
        assert is_allowed(grammar, [*ids, EOS]), answer
        if "true" in answer:
            assert not is_allowed(grammar, tokenizer.encode(answer.replace("true", "1"), add_special_tokens=False))


def is_allowed(grammar: CompiledGrammar, ids: list[int]) -> bool:
    matcher, bits = grammar.matcher(), np.zeros(num_words(VOCAB_SIZE), np.uint32)
    for token in ids:
        matcher.fill(bits)
        assert matcher.error is None, matcher.error
        if not bits[token // 32] >> np.uint32(token % 32) & np.uint32(1):
            return False
        matcher.advance([token])
    return True
