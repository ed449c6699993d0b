"""Every answer of the corpus is read as it is meant, however it is cut; a call never has a part of its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from chairlift.server.tools.answer_formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from chairlift.server.tools.answer_parser import AnswerParser, DeltaMessage
from chairlift.server.tools.channel_parser import ChannelParser
from chairlift.server.tools.reasoning_parser import AnswerTagParser, ReasoningParser, SpecialTagParser
from chairlift.server.tools.tag_scanner import argument_kinds
from chairlift.server.tools.tool_parser import ToolParser
from chairlift.structured_outputs import Reasoning
from support.call_corpus import CORPUS, NAMES, SCHEMA, Answer
from support.case_loop import loop_over

KINDS = dict.fromkeys(NAMES, argument_kinds(SCHEMA))


def new_parser(forms: str) -> AnswerParser:
    reasoning_name, _, name = forms.rpartition("+")
    calls, reasoning = TOOL_CALL_FORMATS[name], REASONING_FORMATS.get(reasoning_name)
    if calls.channels is not None:
        return ChannelParser(calls, frozenset(NAMES), kinds=KINDS)
    rest: Callable[[], AnswerParser] = partial(ToolParser, calls, frozenset(NAMES), None, KINDS)
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


def read(answer: Answer, size: int) -> DeltaMessage:
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
        assert not difference(answer, read(answer, size)), size


def test_the_corpus_has_all_formats() -> None:
    forms = {part for answer in CORPUS for part in answer.form.split("+")}
    assert forms >= TOOL_CALL_FORMATS.keys() | REASONING_FORMATS.keys()
    assert len(CORPUS) >= 200
