"""The calls that a chat template writes are read back in its format."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from chairlift.loading.text.chat_template import ChatTemplate
from chairlift.loading.text.marked_text import unmarked
from chairlift.server.tools.answer_formats import TOOL_CALL_FORMATS, CallFormat, tool_call_format
from chairlift.server.tools.answer_parser import AnswerParser, DeltaMessage
from chairlift.server.tools.call_detection import MARKER_START
from chairlift.server.tools.channel_parser import ChannelParser
from chairlift.server.tools.tag_scanner import argument_kinds
from chairlift.server.tools.tool_instructions import written_variables
from chairlift.server.tools.tool_parser import ToolParser
from support.call_templates import WRITING
from support.chat_templates import TEMPLATES

FAMILIES: dict[str, tuple[str, str]] = {
    **WRITING,
    "qwen3": ("hermes", TEMPLATES["qwen3"]),
    "hermes": ("hermes", TEMPLATES["hermes"]),
    "llama31": ("llama3_json", TEMPLATES["llama31"]),
    "mistral": ("mistral", TEMPLATES["mistral"]),
    "gemma4": ("gemma4", TEMPLATES["gemma4"]),
    "olmo3": ("olmo3", TEMPLATES["olmo3"]),
    "gpt_oss": ("openai", TEMPLATES["gpt_oss"]),
}
ONE_CALL = ("llama31", "gpt_oss", "gigachat3")
TEXT_ARGUMENTS = ("deepseek_v3", "deepseek_v31", "apertus", "firefunction", "solar_open")
NO_NULL = ("gemma4",)
NUM_CALLS = 60
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "items": {"type": "array"},
        "nested": {"$ref": "#/$defs/n"},
        "mode": {"enum": ["1", "true", "fast"]},
    },
    "$defs": {"n": {"type": "object"}},
}
TEXTS = [
    "",
    "5",
    "true",
    "null",
    "a\nb",
    "\n x \n",
    "<b>é</b> & </p>",
    'say "hi"',
    "it's \\ {x}",
    "漢 \U0001f600",
    "[1]",
]


def template_of(text: str) -> ChatTemplate:
    return ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"})


def random_arguments(rng: random.Random, has_null: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "text": rng.choice(TEXTS),
        "count": rng.choice([0, -5, 12345678901234567890]),
        "ratio": rng.choice([0.5, -2.25, 3]),
        "flag": rng.random() < 0.5,
        "maybe": rng.choice([1, None]) if has_null else 1,
        "items": rng.choice([[], [1, "a'b", True], [[2.5], {"k": "v"}]]),
        "nested": rng.choice([{}, {"a": 1, "b": {"c": ["d", False]}}]),
        "mode": rng.choice(["1", "true", "fast"]),
    }
    return {key: values[key] for key in rng.sample(list(values), rng.randint(0, 4))}


def written_turn(family: str, template: ChatTemplate, calls: list[dict[str, Any]]) -> str:
    """The text of an assistant's turn with these calls, as the template writes it."""
    as_text = family in TEXT_ARGUMENTS
    listed = []
    for index, call in enumerate(calls):
        call_id = f"functions.f:{index}" if "c['id']" in template.text else "abcdefghi"
        arguments = json.dumps(call["arguments"]) if as_text else call["arguments"]
        listed.append({"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}})
    turn = {"role": "assistant", "content": None if family == "deepseek_v3" else "", "tool_calls": listed}
    further = written_variables(template, [])
    prompts = [
        unmarked(template.render([{"role": "user", "content": "a"}, last], add_generation_prompt=False, **further))
        for last in (turn, {"role": "assistant", "content": "~"})
    ]
    start = next(i for i, pair in enumerate(zip(*prompts, strict=False)) if pair[0] != pair[1])
    return prompts[0][len(MARKER_START.sub("", prompts[0][:start])) :]


def read_in_cuts(parser: AnswerParser, text: str, rng: random.Random) -> DeltaMessage:
    pieces = []
    while text:
        size = rng.choice([1, 2, 5, 40, len(text)])
        pieces.append(parser.feed(text[:size]))
        text = text[size:]
    return DeltaMessage.joined([*pieces, parser.finish(is_complete=True)])


def new_parser(form: CallFormat) -> AnswerParser:
    names, kinds = frozenset("f"), {"f": argument_kinds(SCHEMA)}
    if form.channels is not None:
        return ChannelParser(form, names, kinds=kinds)
    return ToolParser(form, names, None, kinds)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_is_derived_from_the_template(family: str) -> None:
    name, text = FAMILIES[family]
    assert tool_call_format("auto", text) is TOOL_CALL_FORMATS[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_calls_are_read_back_as_the_template_writes_them(family: str) -> None:
    name, text = FAMILIES[family]
    template, rng = template_of(text), random.Random(family)
    for _ in range(NUM_CALLS):
        calls = [
            {"name": "f", "arguments": random_arguments(rng, family not in NO_NULL)}
            for _ in range(1 if family in ONE_CALL else rng.randint(1, 3))
        ]
        turn = written_turn(family, template, calls)
        answer = read_in_cuts(new_parser(TOOL_CALL_FORMATS[name]), turn, rng)
        found = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in answer.tool_calls]
        assert found == calls, turn
        form = TOOL_CALL_FORMATS[name]
        assert form.channels is not None or not any(
            part in answer.content for part in (*form.markers, *form.skipped)
        ), turn


CODER = TOOL_CALL_FORMATS["qwen3_coder"]


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ("<function=f>\n<parameter=text>\n5\n</parameter>\n</function>\n</tool_call>", {"text": "5"}, ""),
        (
            "<tool_call>\n<function=f>\n<parameter=text>\n<a>\n</parameter>\n</a>\n</parameter>\n</function>\n</tool_call>",
            {"text": "<a>\n</parameter>\n</a>"},
            "",
        ),
        ("Well. <tool_call><function=f></function></tool_call>", {}, "Well."),
        ('<tool_call>\n{"name": "f", "arguments": {"count": 1}}\n</tool_call>', {"count": 1}, ""),
        (
            "<tool_call>\n<function=f>\n<parameter=count>\nmany\n</parameter></function></tool_call>",
            {"count": "many"},
            "",
        ),
        ("<tool_call>\n<function=f>\n<parameter=other>\n[1]\n</parameter></function></tool_call>", {"other": [1]}, ""),
        ("<tool_call>\n<function=f>\n<parameter=text>\nab", {"text": "ab"}, ""),
        ("<function=f>\n<parameter=text>\nab\n</parameter>\n", {"text": "ab"}, ""),
        ("<function=f>\n<parameter=count>\n5\n</parameter>", {"count": 5}, ""),
        ("<tool_call><function=f><parameter=text>ab</parameter></tool_call> c", {"text": "ab"}, " c"),
        ("<function=f><parameter=ratio>1e999</parameter></function>", {"ratio": "1e999"}, ""),
        ("<function=f><parameter=other>+49123</parameter></function>", {"other": "+49123"}, ""),
        ("<function=f><parameter=other>0123</parameter></function>", {"other": "0123"}, ""),
        ("<function=f><parameter=other>1, y=2</parameter></function>", {"other": "1, y=2"}, ""),
        (
            "<tool_call>\n<function=g>\n</function>\n</tool_call>",
            None,
            "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        ),
        (f"<function=f>\n<parameter=count>\n{'[' * 9000}</parameter></function>", {"count": "[" * 9000}, ""),
        (f"<function=f>\n<parameter=count>\n{'7' * 5000}</parameter></function>", {"count": "7" * 5000}, ""),
        ("a <function of x> <tool_call>x", None, "a <function of x> <tool_call>x"),
    ],
)
def test_calls_between_tags(text: str, arguments: dict[str, Any] | None, content: str) -> None:
    for seed in range(4):
        answer = read_in_cuts(new_parser(CODER), text, random.Random(seed))
        assert [json.loads(call.arguments) for call in answer.tool_calls] == [arguments] * (arguments is not None)
        assert answer.content == content


@pytest.mark.parametrize("text", ["a]]>", "<a>]]>", "x]]", "a & b"])
def test_the_end_of_a_section_is_removed_only_after_its_start(text: str) -> None:
    turn = written_turn("minicpm", template_of(FAMILIES["minicpm"][1]), [{"name": "f", "arguments": {"text": text}}])
    (call,) = read_in_cuts(new_parser(TOOL_CALL_FORMATS["minicpm5"]), turn, random.Random(1)).tool_calls
    assert json.loads(call.arguments) == {"text": text}


def test_ids_of_calls_are_those_of_the_text() -> None:
    text = '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{"count": 1}'
    answer = read_in_cuts(new_parser(TOOL_CALL_FORMATS["kimi_k2"]), text, random.Random(1))
    assert [(call.id, call.arguments) for call in answer.tool_calls] == [("functions.f:7", '{"count": 1}')]


def test_types_of_hostile_schemas_take_linear_time() -> None:
    many = {"anyOf": [{"$ref": "#/$defs/a"}] * 1000}
    assert (
        argument_kinds({"properties": {"x": many, "y": {"anyOf": 5}}, "$defs": {"a": many}}).member("x").kinds()
        == frozenset()
    )
