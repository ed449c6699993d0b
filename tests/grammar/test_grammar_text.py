"""Grammars with reasoning: the beginning of an answer, and the constraint on the text after the reasoning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chairlift.errors import RequestError
from chairlift.grammar.answer_start import AnswerStart
from chairlift.grammar.compiler import GrammarCompiler, num_words
from chairlift.loading.text.hf_tokenizer import folder_tokenizer
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.server.tools.answer_formats import HARMONY, MUSE, REASONING_FORMATS, TOOL_CALL_FORMATS
from chairlift.server.tools.answer_parser import AnswerParser, PlainTextParser
from chairlift.server.tools.channel_parser import ChannelParser
from chairlift.server.tools.reasoning_parser import AnswerTagParser, ReasoningParser
from chairlift.structured_outputs import Reasoning, StructuredOutputs
from support.byte_tokenizer import write_byte_tokenizer
from support.case_loop import loop_over

VOCAB_SIZE, EOS = 450, 2
CONSTRAINTS: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, '{"a": 1}'),
    "json_object": ({"json_object": True}, '{"x": [null]}'),
    "regex": ({"regex": r"\d+-\w+"}, "12-ab"),
    "choice": ({"choice": ["yes", "<no"]}, "<no"),
    "lark": ({"grammar": 'start: "a" WORD\nWORD: /[a-z]+/\n%ignore / +/'}, "a  bc"),
    "gbnf": ({"grammar": 'root ::= "x" [0-9]+'}, "x12"),
}
MARKS = {"text": ("<t>", "</t>"), "special tokens": ("<bos>", "<|tool|>")}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return folder_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])


def accepted(compiler: GrammarCompiler, tokenizer: Tokenizer, constraint: StructuredOutputs, text: str) -> str:
    """The longest prefix of the text that is allowed, in tokens; with `$` if the answer may end there."""
    matcher = compiler.compile(constraint).matcher()
    bits = np.zeros(num_words(VOCAB_SIZE), np.uint32)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for index, token in enumerate([*token_ids, EOS]):
        matcher.fill(bits)
        if not bits[token // 32] >> np.uint32(token % 32) & 1:
            return tokenizer.decode(token_ids[:index], skip_special_tokens=False)
        matcher.advance([token])
    return f"{text}$"


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("spelling", MARKS)
def test_constraint_applies_after_reasoning(
    spelling: str, kind: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    fields, answer = CONSTRAINTS[kind]
    opening, closing = MARKS[spelling]
    for is_inside in (False, True):
        constraint = StructuredOutputs(**fields, reasoning=Reasoning(opening, closing, is_inside))
        whole = f'{opening}\nHm, é {{"a": "</ t>"}} {closing}\n\n{answer}'
        inside = whole.removeprefix(opening)
        assert accepted(compiler, tokenizer, constraint, whole) == f"{whole}$"
        assert accepted(compiler, tokenizer, constraint, whole + "!") == whole
        assert (
            accepted(compiler, tokenizer, constraint, f"{opening}{closing}{answer}") == f"{opening}{closing}{answer}$"
        )
        assert accepted(compiler, tokenizer, constraint, f"{opening}Hm.") == f"{opening}Hm.", "no end"
        assert accepted(compiler, tokenizer, constraint, f"{opening}a{closing}Well") == f"{opening}a{closing}"
        may_begin = accepted(compiler, tokenizer, constraint, inside), accepted(compiler, tokenizer, constraint, answer)
        assert may_begin == ((f"{inside}$", answer) if is_inside else ("", f"{answer}$"))


def test_errors_of_a_grammar_after_reasoning_are_reported(compiler: GrammarCompiler) -> None:
    reasoning = Reasoning("<t>", "</t>")
    with pytest.raises(RequestError, match="foo"):
        compiler.compile(StructuredOutputs(grammar="start: foo", reasoning=reasoning))
    names = {f"p{index}": {"enum": ["x", "y"]} for index in range(2500)}
    with pytest.raises(RequestError, match=r"too complex.*step_max_items"):
        compiler.compile(StructuredOutputs(json={"properties": names}, reasoning=reasoning))


FORMATS = [name for name, form in REASONING_FORMATS.items() if not form.is_implied]


def divided(form: Reasoning | None, pieces: list[str]) -> tuple[str, str]:
    """What precedes the answer, and the answer. The end of the text may begin a marker, and belongs to one of them."""
    start, before, answer = AnswerStart(form), "", ""
    for piece in pieces:
        first, rest = start.add(piece)
        before, answer = before + first, answer + rest
    is_reasoning, held = start._advance == start._in_reasoning, start.flush()
    assert not (answer and held)
    return (before + held, answer) if is_reasoning else (before, answer + held)


def parsed(parser: AnswerParser, text: str) -> str:
    return "".join(piece.content for piece in (*parser.feed_parts(text), parser.finish(True)))


@given(st.sampled_from(FORMATS), st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_the_answer_is_the_content_of_the_parsers(name: str, is_inside: bool, data: st.DataObject) -> None:
    form = REASONING_FORMATS[name]
    tags = form.answer or ("", "")
    reasoning = Reasoning(form.opening, form.closing, is_inside, answer=tags[0])
    words = ["a", "b ", "\n", "<", form.opening, form.opening[:2], form.closing, form.closing[:3], tags[0]]
    pieces = data.draw(st.lists(st.sampled_from(words), max_size=12))
    assume(not tags[0] or "".join(pieces).count(tags[0]) < 2)  # The parser removes all tags of an answer.
    _before, answer = divided(reasoning, pieces)
    assert (_before + answer, answer) == ("".join(pieces), divided(reasoning, list("".join(pieces)))[1])

    def rest() -> AnswerParser:
        return AnswerTagParser(tags, PlainTextParser) if form.answer else PlainTextParser()

    new_answer = PlainTextParser if form.has_bare_answers else None
    content = parsed(ReasoningParser(reasoning, rest, (), new_answer), "".join(pieces))
    # White space before an answer without reasoning is content, but is not searched for stop strings, and of a bare
    # answer the parser of Granite 3.3 keeps the tag.
    expected = content.lstrip().removeprefix(tags[0] if form.has_bare_answers else "").lstrip("\n")
    assert answer.lstrip() == expected.lstrip()


@loop_over(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "Yes."),
        ("<|channel|>analysis<|message|>A<|end|><|channel|>analysis<|message|>B<|end|>", ""),
        ("<|channel|>final<|message|>Yes.", "Yes."),
        ("<|channel|>commentary to=functions.f<|message|>{}", " to=functions.f<|message|>{}"),
        ("<|channel|>analysis<|message|>A<|end|><|channel|>commentary<|message|>B", "<|message|>B"),
        ("Yes.", "Yes."),
    ],
)
def test_harmony(text: str, expected: str) -> None:
    for pieces in ([text], list(text)):
        assert divided(HARMONY.before_answer, pieces)[1] == expected
    if expected == "Yes.":
        assert parsed(ChannelParser(TOOL_CALL_FORMATS["openai"], frozenset()), text) == expected


@loop_over(
    ("text", "expected"),
    [
        (" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.", "Yes."),
        (" to=user<|message|>Yes.", "Yes."),
        (" to=f<|message|><atem:function_calls>", ""),
        ("Yes.", "Yes."),
    ],
)
def test_muse_glimmer(text: str, expected: str) -> None:
    for pieces in ([text], list(text)):
        assert divided(MUSE.before_answer, pieces)[1] == expected
    if expected == "Yes.":
        assert parsed(ChannelParser(TOOL_CALL_FORMATS["muse_glimmer"], frozenset()), text) == expected


def test_little_text_is_held_back() -> None:
    start = AnswerStart(Reasoning("<think>", "</think>", answer="<answer>"))
    for piece in [" \n"] * 1000 + ["<thi", "nk>"] + ["x</thin"] * 1000 + ["k>", *"\n" * 1000, "<answ"]:
        start.add(piece)
        assert len(start._held) <= len("</think>")
    assert start.add("er>Yes") == ("<answer>", "Yes")
