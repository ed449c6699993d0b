"""Grammars with reasoning: the constraint applies to the text after the reasoning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chairlift.errors import RequestError
from chairlift.grammar.compiler import GrammarCompiler, num_words
from chairlift.loading.text.hf_tokenizer import folder_tokenizer
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.structured_outputs import Reasoning, StructuredOutputs
from support.byte_tokenizer import write_byte_tokenizer

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
