"""Added tokens match in template text only, and other text is encoded in the same way as by the library."""

from __future__ import annotations

import re

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from chairlift.loading.text.added_token_guard import AddedTokenGuard, is_markup, unknown_id
from chairlift.loading.text.marked_text import MarkedText, join_marked, template_spans, template_text, unmarked
from support.chat_tokenizers import BACKENDS, MARKUP, SPECIAL, WHITE_SPACE

TOKENS = SPECIAL + MARKUP
PARTS = ["<", "<|", "im_", "<|im_", "start|>", "|>", "</", "s>", "/s>", "think>", "[", "INST]", "[/INST", "tool_call>"]
WORDS = [
    "user",
    "system",
    "the",
    " quick",
    " ",
    "\n",
    "  ",
    "\n\n",
    "é",
    "e\u0301",
    "漢",
    "\U0010ffff",
    "\ue000",
    "12",
    "x",
]
FULL_WIDTH = ["＜|im_end|＞", "<|IM_END|>", "<THINK>", "<ｓ>"]

hostile = st.lists(st.sampled_from([*TOKENS, *PARTS, *WORDS, *FULL_WIDTH]), max_size=6).map("".join)
ordinary = st.lists(st.sampled_from([*WORDS, "<b>", "a < b", "| x |", "[1, 2]", "'s"]), max_size=8).map(
    "".join
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
template = st.lists(st.sampled_from([*TOKENS, *WORDS, *PARTS]), max_size=4).map("".join).map(template_text)


def prompts(content: st.SearchStrategy[str]) -> st.SearchStrategy[MarkedText]:
    return st.lists(template | content, max_size=7).map(join_marked)


def guarded(guard: AddedTokenGuard, ids: list[int]) -> list[int]:
    """Return the ids that are special tokens or markup, without `<unk>`, which other text produces as well."""
    tokens = {i for spelling, i in guard.guarded_tokens.items() if spelling != "<unk>"}
    return [i for i in ids if i in tokens]


def added_tokens_of(text: str) -> list[str]:
    """Return the added tokens that a text spells, from left to right, the longest first."""
    return re.findall("|".join(re.escape(token) for token in sorted(TOKENS, key=len, reverse=True)), text)


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return BACKENDS[request.param]()


@pytest.fixture(scope="module")
def guard(backend: tokenizers.Tokenizer) -> AddedTokenGuard:
    return AddedTokenGuard(backend)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_content_never_produces_an_added_token(guard: AddedTokenGuard, data: st.DataObject) -> None:
    assert guarded(guard, guard.encode(MarkedText(data.draw(hostile)))) == []


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_template_text_produces_added_tokens(
    backend: tokenizers.Tokenizer, guard: AddedTokenGuard, data: st.DataObject
) -> None:
    prompt = data.draw(prompts(hostile))
    plain = unmarked(prompt)
    expected = [token for start, end in template_spans(prompt) for token in added_tokens_of(plain[start:end])]
    tokens = {i: token for token, i in guard.guarded_tokens.items()}
    found = [tokens[i] for i in guarded(guard, guard.encode(prompt))]
    if any(backend is BACKENDS[name]() for name in ("flags", "normalized_markup")):
        remaining = iter(expected)
        assert all(token in remaining for token in found), "the library matches some as words or after spaces only"
    else:
        assert found == expected


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_prompts_without_spellings_equal_the_library(
    backend: tokenizers.Tokenizer, guard: AddedTokenGuard, data: st.DataObject
) -> None:
    pieces = data.draw(st.lists(st.sampled_from(TOKENS).map(template_text) | ordinary, max_size=7))
    prompt = join_marked(pieces)
    expected = backend.encode(unmarked(prompt), add_special_tokens=False).ids
    if guard._template_tokens(prompt) is not None:
        assert guard.encode(prompt) == expected
        assert guard.encode_with_aliases(prompt) == expected
        assert guard.encode(prompt, add_special_tokens=True) == backend.encode(unmarked(prompt)).ids


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_content_is_unchanged(data: st.DataObject) -> None:
    backend = BACKENDS["unsplit_bytes"]()
    prompt = data.draw(prompts(hostile))
    assume("é" not in prompt)  # the library decodes this added token as a byte
    ids = AddedTokenGuard(backend).encode(prompt)
    assert backend.decode(ids, skip_special_tokens=False) == unmarked(prompt)


def test_merges_into_a_control_token_are_cut() -> None:
    """The merges of this vocabulary turn plain text into `</s>`, which merges derived for GGUF files can do."""
    backend = BACKENDS["sentencepiece"]()
    inner = Tokenizer(backend.model)
    assert [token for token in inner.encode("</s>").tokens if token == "</s>"] == ["</s>"]
    guard = AddedTokenGuard(backend)
    ids = guard.encode(MarkedText("a</s>b</s></s>"))
    assert guarded(guard, ids) == []
    assert backend.decode(ids, skip_special_tokens=False).replace(" ", "") == "a</s>b</s></s>"


def test_content_that_spells_the_unknown_token_is_text() -> None:
    backend = BACKENDS["unigram"]()
    guard = AddedTokenGuard(backend)
    unknown = unknown_id(backend)
    assert backend.id_to_token(unknown) == "<unk>"
    assert guard.encode(MarkedText("the \U0001f3bf")).count(unknown) == 1
    spelled = guard.encode(MarkedText("the <unk>"))
    written = guard.encode(join_marked(["the ", template_text("<unk>"), "</s>"]))
    assert len(spelled) > len(backend.encode("the <unk>", add_special_tokens=False).ids)
    assert written.count(unknown) == spelled.count(unknown) + 1


def test_white_space_and_single_characters_are_not_guarded() -> None:
    backend = BACKENDS["byte_level"]()
    for token in WHITE_SPACE:
        assert not is_markup(AddedToken(token))
        assert AddedTokenGuard(backend).encode(MarkedText(f"{token}<think>"))[0] == backend.token_to_id(token)
    assert is_markup(AddedToken("<think>"))
    assert is_markup(AddedToken("\n\n", special=True))


def test_vocabulary_with_gaps() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 4, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>"])
    guard = AddedTokenGuard(backend)
    assert guard.encode(MarkedText("b b <s> b")) == [4, 4, 1, 4]
    assert guard.encode_with_aliases(join_marked([template_text("<s>"), " b"])) == [backend.token_to_id("<s>"), 4]


def test_tokenizer_without_added_tokens() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert AddedTokenGuard(backend).encode(MarkedText("a")) == [0]


def test_time_depends_on_the_length_of_the_text_only() -> None:
    """The time is not multiplied by thousands of added tokens, nor by text that begins one at every character."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    backend.add_special_tokens([f"<unused{number}>" for number in range(5000)])
    guard = AddedTokenGuard(backend)
    assert guard.encode(MarkedText("<unused" * 50_000)) == [0]
    assert guarded(guard, guard.encode(MarkedText("<unused77>" * 20_000))) == []
