"""Tool calls and reasoning are parsed from text, and the result does not depend on how the text is cut."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.tools.answer_formats import FORCED_CALLS, REASONING_FORMATS, TOOL_CALL_FORMATS
from chairlift.server.tools.answer_parser import (
    CHARACTERS_PER_FEED,
    AnswerParser,
    DeltaMessage,
    NamedToolParser,
    PlainTextParser,
)
from chairlift.server.tools.channel_parser import ChannelParser
from chairlift.server.tools.reasoning_parser import AnswerTagParser, ReasoningParser, SpecialTagParser
from chairlift.server.tools.tag_scanner import argument_kinds
from chairlift.server.tools.tool_parser import ToolParser
from chairlift.structured_outputs import Reasoning
from support.call_corpus import CORPUS, SCHEMA, Answer
from support.call_corpus import NAMES as CORPUS_NAMES
from support.case_loop import loop_over

NAMES = frozenset({"get_weather", "f"})
OPENAI = TOOL_CALL_FORMATS["openai"]
Read = tuple[str, str, list[tuple[str, str]]]


def tool_parser(family: str) -> Callable[[], AnswerParser]:
    if family == "openai":
        return lambda: ChannelParser(OPENAI, NAMES)
    return lambda: ToolParser({**TOOL_CALL_FORMATS, "forced": FORCED_CALLS}[family], NAMES)


def read(parser: AnswerParser, parts: list[str], is_complete: bool = False) -> Read:
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    for piece in [*map(parser.feed, parts), parser.finish(is_complete)]:
        content += piece.content
        reasoning += piece.reasoning
        for delta in piece.tool_calls:
            if delta.id is not None:
                assert delta.index == len(calls)
                calls.append((delta.name or "", ""))
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return content, reasoning, calls


WEATHER = ("get_weather", '{"city": "Paris, {France}"}')
CALL = f'{{"name": "get_weather", "arguments": {WEATHER[1]}}}'
EXAMPLES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call> Done.", " Done.", [WEATHER, WEATHER]),
    ("hermes", '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1]}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
    ("hermes", "a < b and <tool_cal", "a < b and <tool_cal", []),
    ("hermes", "<tool_call>nothing</tool_call> ", "<tool_call>nothing</tool_call> ", []),
    ("llama3_json", ' {"answer": 42}', ' {"answer": 42}', []),
    ("llama3_json", "[1, 2] are numbers", "[1, 2] are numbers", []),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{"b": 2}', "", [("f", '{"a": 1}'), ("f", '{"b": 2}')]),
    ("mistral", "I cannot [TOOL", "I cannot [TOOL", []),
    ("forced", f"[{CALL}]", "", [WEATHER]),
    ("granite", f"<tool_call>[{CALL}]", "", [WEATHER]),
    ("granite", f" [{CALL}]", "", [WEATHER]),
    ("granite", "[1] is a source", "[1] is a source", []),
    ("phi4_mini_json", f'<|tool_call|>[{{"type": "function", "function": {CALL}}}]<|/tool_call|>', "", [WEATHER]),
    ("phi4_mini_json", "import functools", "import functools", []),
    ("olmo3", "See: <function_calls>f(x={'y': [None, 'it\\'s']})", "See:", [("f", '{"x": {"y": [null, "it\'s"]}}')]),
    ("olmo3", "<function_calls>g(a=1)</function_calls>", "<function_calls>g(a=1)</function_calls>", []),
    ("olmo3", "<function_calls>f(1)</function_calls>", "<function_calls>f(1)</function_calls>", []),
    ("gemma4", 'Now: <|tool_call>call:f{a:[1,true,{b:<|"|>say "x" | <|y<|"|>,<|"|>c d<|"|>:null}]}<tool_call|>'
     "<|tool_call>call:f{}<tool_call|>", "Now:", [("f", '{"a": [1, true, {"b": "say \\"x\\" | <|y", "c d": null}]}'),
     ("f", "{}")]),
    ("gemma4", "<|tool_call>call:f{a: word , b:[],}", "", [("f", '{"a": "word", "b": []}')]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>b', "", [("f", '{"a": "b')]),
    ("gemma4", "<|tool_call>call:g{a:1}<tool_call|>", "<|tool_call>call:g{a:1}<tool_call|>", []),
    ("gemma4", "<|tool_call>calling f{}<tool_call|>", "<|tool_call>calling f{}<tool_call|>", []),
    ("pythonic", f"```json\n{CALL}\n```\n```json\n{CALL}\n```", "", [WEATHER] * 2),
    ("pythonic", '```json\n{"a": 1}\n``` shows f(a=1)', '```json\n{"a": 1}\n``` shows f(a=1)', []),
    ("pythonic", "[```", "[```", []),
    ("gemma4", "<|tool_call>call:f{a:1]}<tool_call|> b", " b", [("f", '{"a": 1]}')]),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>x</tool_call>", "",
     [("f", "<arg_key>a</arg_key>\n<arg_value>1</arg_value>x</tool_call>")]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), EXAMPLES)
def test_calls_are_parsed_and_other_text_is_content(
    family: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(tool_parser(family)(), [text]) == (content, "", calls)
    assert read(tool_parser(family)(), list(text)) == (content, "", calls)


REPAIRED: list[tuple[str, Any]] = [
    ('{"a": "one\ntwo\tthree\x00"}', {"a": "one\ntwo\tthree\x00"}),
    ('{"a": "one", "b": True, "c": None, "d": [False,],}', {"a": "one", "b": True, "c": None, "d": [False]}),
    ("{'a': 'it\\'s \"x\"', b: word}", {"a": 'it\'s "x"', "b": "word"}),
    ('{"a": 1e3, "b": -0.10, "c": 12345678901234567890}', {"a": 1e3, "b": -0.1, "c": 12345678901234567890}),
    (r'{"a": "\ud83d\ude00 \/ \d \ud83d"}', {"a": "\U0001f600 / \\d \ufffd"}),
    ('"{\\"a\\": True}"', {"a": True}),
    ("null", {}),
]
CALL_TEXTS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": %s}]',
    "granite": '<|tool_call|>[{"arguments": %s, "name": "f"}]',
    "phi4_mini_json": 'functools[{"type": "function", "function": {"name": "f", "arguments": %s}}]',
}


@pytest.mark.parametrize("family", CALL_TEXTS)
@pytest.mark.parametrize(("written", "meant"), REPAIRED)
def test_arguments_that_are_almost_json_are_repaired(family: str, written: str, meant: Any) -> None:
    text = CALL_TEXTS[family] % written
    content, _, calls = found = read(tool_parser(family)(), [text])
    assert read(tool_parser(family)(), list(text)) == found
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", meant)]
    assert content == ""


@pytest.mark.parametrize("written", ["[1]", '"no JSON"', "7", "7" * 5000, "print(1)", '"[1]"'])
def test_calls_without_an_object_of_arguments_are_content(written: str) -> None:
    text = CALL_TEXTS["hermes"] % written
    assert read(tool_parser("hermes")(), list(text)) == (text, "", [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": "b', {"a": "b"}),
        ('{"name": "f", "arguments": {"a": 12', {"a": 12}),
        ('{"name": "f", "arguments": {"a": [True', {"a": [True]}),
    ],
)
def test_arguments_that_break_off_are_completed_if_the_model_ended_the_answer(text: str, arguments: Any) -> None:
    for parts in ([text], list(text)):
        parser = tool_parser("hermes")()
        pieces = [parser.feed("<tool_call>"), *map(parser.feed, parts), parser.finish(is_complete=True)]
        written = "".join(delta.arguments for piece in pieces for delta in piece.tool_calls)
        assert json.loads(written) == arguments


@loop_over(
    ("text", "arguments"),
    [
        ('{"a": [1, {"b"', '{"a": [1, {"b"'),
        ('{"a": ', '{"a"'),
        ('{"a": tr', '{"a"'),
        ('{"a": "x" "y"}} and', '{"a": "x" "y"}} and'),
        ("{\"a\": '''x'''}}", "{\"a\": \"\"'x'''}}"),
        ('{"a": "\\uZZ" 1}}', '{"a": "\\\\uZZ" 1}}'),
    ],
)
def test_arguments_that_are_not_read_whole_are_never_those_of_another_call(text: str, arguments: str) -> None:
    call = '<tool_call>{"name": "f", "arguments": ' + text
    for parts in ([call], list(call)):
        assert read(tool_parser("hermes")(), parts, is_complete=True) == ("", "", [("f", arguments)])
        with pytest.raises(ValueError, match="line 1"):
            json.loads(arguments)


@pytest.mark.parametrize(("family", "text"), [("gemma4", "<|tool_call>So"), ("gemma4", "<|tool_call>calm")])
def test_text_is_not_held_back_when_it_can_be_no_call(family: str, text: str) -> None:
    assert tool_parser(family)().feed(text).content == text


def test_calls_beyond_the_limit_are_dropped() -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    assert read(ToolParser(TOOL_CALL_FORMATS["hermes"], NAMES, max_calls=1), [text])[2] == [WEATHER]


def test_arguments_are_streamed_while_they_are_generated() -> None:
    parser = ToolParser(TOOL_CALL_FORMATS["hermes"], NAMES)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {').tool_calls[0].name == "f"
    assert parser.feed('"a"').tool_calls[0].arguments == '"a"'
    assert parser.feed(": 1}").tool_calls[0].arguments == ": 1}"


def count_calls(function: Callable[[], object]) -> int:
    """The number of calls of functions, in Python and in C, while `function` runs."""
    count = 0

    def record(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_an_object_without_a_name_becomes_content_within_bounded_work() -> None:
    def parse(depth: int) -> None:
        nested = '<tool_call>{"a":[' * depth + "]}" * depth + "x"
        assert read(tool_parser("hermes")(), [nested]) == (nested, "", [])

    assert count_calls(lambda: parse(400)) < 3 * count_calls(lambda: parse(200))
    late = '<tool_call>{"id": "' + "b" * 600 + '", "arguments": {}, "name": "f"}'
    assert read(tool_parser("hermes")(), [late]) == read(tool_parser("hermes")(), list(late)) == (late, "", [])


@loop_over(
    ("family", "beginning", "end"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "', '"}, "name": "other"}</tool_call>'),
        ("olmo3", "<function_calls>f(a=[1, '", "'], b=x)</function_calls>"),
        ("olmo3", "<function_calls>f(a=", ""),
        ("lfm2", "<|tool_call_start|>[f(a='it's <b> ", "')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a='it's <b> ", "', b=x)]<|tool_call_end|>"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1 x', "}"),
        ("openai", "<|channel|>commentary to=functions.f<|message|>print(", ")<|call|>"),
    ],
)
def test_calls_that_are_held_back_or_broken_are_read_in_linear_time(family: str, beginning: str, end: str) -> None:
    def parse(num_parts: int) -> None:
        read(tool_parser(family)(), list(beginning + beginning * num_parts + end))

    assert count_calls(lambda: parse(160)) < 2.5 * count_calls(lambda: parse(80))


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "lo\n", '{"name": ', '"f"', ", ",
    '"arguments": ', '"parameters": ', '{"a": "}"}', "{}", "}", "{", "[", "]", '"', "\\", "\n", " ", ";", "f", "Hello.",
    "<think>", "</think>", "<", CALL, '"get_weather"', "<|tool_call|>", "<|/tool_call|>", "functools[",
    "<function_calls>", "</function_calls>", "```tool_code", "```json", "```", "`", "f(", "a=", "'b'", ")", "None",
    "1.5", '"function": ',
    "Here is my thought process:", "Here is my response:", "<|start|>assistant", "<|channel|>", "analysis", "final",
    "commentary to=functions.f ", "<|constrain|>json", "<|message|>", "<|end|>", "<|call|>",
    "r'", "\"\"\"", "# ", "=", "(", "f(a='it's ", "')]", "<|tool_call_start|>[", "<|tool_call_end|>", "0x1F",
    "<|tool_call>", "call:", "f{a:", '<|"|>', "<tool_call|>", "<|channel>", "thought\n", "<channel|>",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
PARSERS: dict[str, Callable[[], AnswerParser]] = {
    **{family: tool_parser(family) for family in (*TOOL_CALL_FORMATS, "forced")},
    "named": lambda: NamedToolParser("f", None),
    "reasoning": lambda: ReasoningParser(Reasoning("<think>", "</think>"), tool_parser("hermes")),
    "inside": lambda: ReasoningParser(Reasoning("<think>", "</think>", is_inside=True), PlainTextParser),
    "unclosed": lambda: ReasoningParser(
        Reasoning("<think>", "</think>", is_inside=True), tool_parser("hermes"), ("<tool_call>",)
    ),
    "gemma4 reasoning": lambda: ReasoningParser(
        Reasoning("<|channel>", "<channel|>", label="thought"), tool_parser("gemma4")
    ),
    "granite reasoning": lambda: ReasoningParser(
        Reasoning("Here is my thought process:", "Here is my response:"), tool_parser("granite")
    ),
    "special tags": lambda: SpecialTagParser(("<think>", "</think>"), tool_parser("hermes")),
    "answer tags": lambda: AnswerTagParser(("<think>", "</think>"), tool_parser("hermes")),
    "answer tags and calls": lambda: AnswerTagParser(
        ("<think>", "</think>"), tool_parser("hermes"), ("<tool_call>",), is_inside=True
    ),
}


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=40)
@given(text=texts, data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_cut(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(PARSERS[name](), [text])
    assert read(PARSERS[name](), parts) == whole
    assert read(PARSERS[name](), list(text)) == whole


@given(texts)
def test_text_without_a_call_is_unchanged(text: str) -> None:
    for family in TOOL_CALL_FORMATS.keys() - {"openai"}:
        content, _, calls = read(tool_parser(family)(), [text])
        assert calls or content == text


@pytest.mark.parametrize(
    ("text", "is_inside", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, ("Yes.", "Hm.")),
        ("\nHm.\n</think>\n\nYes.", True, ("Yes.", "Hm.")),
        ("<think>\nHm.\n</think>\n\nYes.", True, ("Yes.", "Hm.")),
        ("Yes.", False, ("Yes.", "")),
        ("Hm", True, ("", "Hm")),
        ("<thin", False, ("<thin", "")),
        ("<think>\n\n</think>\n\nYes.", False, ("Yes.", "")),
        ("<think>Hm. ", False, ("", "Hm. ")),
    ],
)
def test_reasoning_is_separated_from_the_content(text: str, is_inside: bool, expected: tuple[str, str]) -> None:
    parser = ReasoningParser(Reasoning("<think>", "</think>", is_inside), PlainTextParser)
    assert read(parser, [text])[:2] == expected


UNCLOSED = f"Hm.\n\n<tool_call>{CALL}</tool_call>"


@pytest.mark.parametrize(
    ("text", "is_complete", "expected"),
    [
        (UNCLOSED, True, ("", "Hm.", [WEATHER])),
        (f"{UNCLOSED}\n<tool_call>{CALL}</tool_call> So.", True, (" So.", "Hm.", [WEATHER, WEATHER])),
        (UNCLOSED, False, ("", UNCLOSED, [])),
        (f"{UNCLOSED}\nor\n</think>\nNo.", True, ("No.", f"{UNCLOSED}\nor", [])),
        (f"{UNCLOSED}</think><tool_call>{CALL}", True, ("", UNCLOSED, [WEATHER])),
        ("Is <tool_call> a tag?", True, ("", "Is <tool_call> a tag?", [])),
    ],
)
def test_a_call_in_reasoning_that_is_not_closed_belongs_to_the_answer(
    text: str, is_complete: bool, expected: Read
) -> None:
    for parts in ([text], list(text)):
        form = Reasoning("<think>", "</think>", is_inside=True)
        parser = ReasoningParser(form, tool_parser("hermes"), ("<tool_call>",))
        assert read(parser, parts, is_complete) == expected


def undecided_parser(rest: AnswerParser) -> ReasoningParser:
    """A parser that holds back all text as what may be a call."""
    parser = ReasoningParser(Reasoning("<think>", "</think>", is_inside=True), lambda: rest, ("<tool_call>",))
    parser.feed("Hm.<tool_call>" + "x" * 1_000_000)
    return parser


def test_text_that_is_held_back_is_not_copied_for_each_token() -> None:
    parser = undecided_parser(PlainTextParser())
    tracemalloc.start()
    parser.feed("abcd")
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_text_that_was_held_back_is_parsed_in_parts() -> None:
    sizes: list[int] = []

    class Rest(PlainTextParser):
        def feed(self, text: str) -> DeltaMessage:
            sizes.append(len(text))
            return super().feed(text)

    undecided_parser(Rest()).finish(is_complete=True)
    assert sum(sizes) == 1_000_000 + len("<tool_call>")
    assert max(sizes) == CHARACTERS_PER_FEED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", ("Yes.", "Hm.", [])),
        ("<answer>\na </b> <answer> b\n</answer>", ("a </b> <answer> b", "", [])),
        ("<think>Hm.</think>Yes.</answer>", ("Yes.</answer>", "Hm.", [])),
        ("<answer>Yes", ("Yes", "", [])),
        ("<answ", ("<answ", "", [])),
        (f"<think>Hm.</think><answer>So: <tool_calls>[{CALL}]</tool_calls></answer>", ("So:", "Hm.", [WEATHER])),
        (f"<answer>So:\n</answer>\n<tool_calls>[{CALL}]</tool_calls>", ("So:", "", [WEATHER])),
        ("<answer>Use </answer> to close.\n</answer>\n", ("Use </answer> to close.", "", [])),
        ("<answer>A\n</answer>\n\nB", ("A\n</answer>\n\nB", "", [])),
        ("<answer></answer></answer>", ("</answer>", "", [])),
        ("<answer>A</answer><tool", ("A</answer><tool", "", [])),
        ("<answer>\n</ans", ("</ans", "", [])),
    ],
)
def test_tags_around_an_answer_are_removed(text: str, expected: Read) -> None:
    form = REASONING_FORMATS["hunyuan_a13b"]
    assert form.answer == ("<answer>", "</answer>")
    for parts in ([text], list(text)):
        tagged = AnswerTagParser(form.answer, tool_parser("hunyuan_a13b"), ("<tool_calls>",))
        assert (
            read(ReasoningParser(Reasoning(form.opening, form.closing), lambda tagged=tagged: tagged), parts)
            == expected
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\nHm.\n<channel|>Yes.", ("Yes.", "Hm.")),
        ("<|channel>thoughtful<channel|>Yes.", ("Yes.", "thoughtful")),
        ("<|channel>thou<channel|>Yes.", ("Yes.", "thou")),
        ("<|channel>thought\n<channel|>Yes.", ("Yes.", "")),
        ("<|channel>thought\nthought<channel|>Yes.", ("Yes.", "thought")),
    ],
)
def test_the_label_of_reasoning_is_not_part_of_it(text: str, expected: tuple[str, str]) -> None:
    form = Reasoning("<|channel>", "<channel|>", label="thought")
    for parts in ([text], list(text)):
        assert read(ReasoningParser(form, PlainTextParser), parts)[:2] == expected


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
WEATHER_HEADER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANALYSIS + FINAL, ("Yes.", "Hm.", [])),
        (f"{ANALYSIS}<|start|>assistant{WEATHER_HEADER}{WEATHER[1]}<|call|>", ("", "Hm.", [WEATHER])),
        (ANALYSIS + "<|start|>assistant to=functions.f<|channel|>x json<|message|>", ("", "Hm.", [("f", "{}")])),
        ("<|channel|>final<|message|>Yes.<|end|> More.", ("Yes. More.", "", [])),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ("", "", [("f", "{}")])),
        ("<|channel|>commentary<|message|>I look.<|end|>" + FINAL, ("I look.Yes.", "", [])),
        ("<|channel|>commentary to=functions.g<|message|>{}<|call|>", ("{}", "", [])),
        ("<|channel|>analysis<|message|>One.<|start|>assistant<|channel|>analysis<|message|>Two", ("", "One.Two", [])),
        (" to=functions.f<|channel|>x<|message|>print(1)<|call|>", ("", "", [("f", "print(1)")])),
        (" to=functions.f<|channel|>x<|message|>{'a': [1, ]} \n<|call|>", ("", "", [("f", "{'a': [1, ]} \n")])),
        ("Plain text.", ("Plain text.", "", [])),
        ("<|chan", ("<|chan", "", [])),
        ("<|channel|>final" + "x" * 600 + "<|message|>", ("<|channel|>final" + "x" * 600 + "<|message|>", "", [])),
    ],
)
def test_messages_in_channels(text: str, expected: Read) -> None:
    assert read(ChannelParser(OPENAI, NAMES), [text]) == read(ChannelParser(OPENAI, NAMES), list(text)) == expected


def test_options_of_messages_in_channels() -> None:
    call = f"{WEATHER_HEADER}{WEATHER[1]}<|call|>"
    assert read(ChannelParser(OPENAI, NAMES, max_calls=1), [call + call])[2] == [WEATHER]
    assert read(ChannelParser(OPENAI, NAMES, has_reasoning=False), [ANALYSIS + FINAL]) == ("Hm.Yes.", "", [])


KINDS = dict.fromkeys(CORPUS_NAMES, argument_kinds(SCHEMA))


def new_parser(forms: str) -> AnswerParser:
    reasoning_name, _, name = forms.rpartition("+")
    calls, reasoning = TOOL_CALL_FORMATS[name], REASONING_FORMATS.get(reasoning_name)
    if calls.channels is not None:
        return ChannelParser(calls, frozenset(CORPUS_NAMES), kinds=KINDS)
    rest: Callable[[], AnswerParser] = partial(ToolParser, calls, frozenset(CORPUS_NAMES), None, KINDS)
    if (tags := reasoning or REASONING_FORMATS.get(name)) is not None and tags.special:
        rest = partial(SpecialTagParser, tags.special, rest)
    if reasoning is None:
        return rest()
    answer = rest
    if reasoning.answer is not None:
        rest = partial(AnswerTagParser, reasoning.answer, rest, calls.openings)
        answer = answer if reasoning.has_bare_answers else rest
    form = Reasoning(reasoning.opening, reasoning.closing, reasoning.is_implied, reasoning.label)
    return ReasoningParser(form, rest, calls.openings, answer)


def read_answer(answer: Answer, size: int) -> DeltaMessage:
    parser, text = new_parser(answer.form), answer.text
    pieces = [parser.feed(text[start : start + size]) for start in range(0, len(text), size)]
    return DeltaMessage.joined([*pieces, parser.finish(is_complete=True)])


def difference(answer: Answer, found: DeltaMessage) -> str:
    """How the reading differs from the meaning; empty if it does not."""
    meant = answer.text if answer.content is None and not (answer.calls or answer.reasoning) else answer.content or ""
    wanted = (meant, answer.reasoning, list(answer.calls))
    calls = [(call.name, json.loads(call.arguments)) for call in found.tool_calls]
    got = (found.content, found.reasoning, calls)
    return "" if got == wanted else f"{got!r:.300} instead of {wanted!r:.300}"


@loop_over("answer", CORPUS)
def test_answers_are_read_as_they_are_meant(answer: Answer) -> None:
    for size in (len(answer.text), 1, 4):
        assert not difference(answer, read_answer(answer, size)), size


def test_the_corpus_has_all_formats() -> None:
    forms = {part for answer in CORPUS for part in answer.form.split("+")}
    assert forms >= TOOL_CALL_FORMATS.keys() | REASONING_FORMATS.keys()
    assert len(CORPUS) >= 200
