"""The parts of a text have the tokens of the whole text, and no call that encodes stops other threads."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_corpus import CODE, EDGES, SCRIPTS, SPECIALS, SYMBOLS
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

import chairlift
from chairlift.loading.model_source import GGUFSource
from chairlift.loading.text import text_encoding
from chairlift.loading.text.marked_text import MarkedText, join_marked, template_text
from chairlift.loading.text.split_patterns import PRE_TOKENIZERS, PreTokenizer
from chairlift.loading.text.tokenizer import Tokenizer

SPACE = "▁"
WORDS = (
    "the a quick Brown FOX it's don't we'll 12 3.14 héllo 中文 カナ x= ::: ... -> <|im_start|> <|im_end|> <s> e\u0301 '"
)
SEPARATORS = [*[" "] * 12, "  ", "\n", "\n\n", " \n ", "\t", "\u3000", ". ", "", "▁", " ▁"]
FRAGMENTS = [*WORDS.split() * 4, *SPECIALS, *SYMBOLS, *CODE, *SCRIPTS, *EDGES]


def _trained(kind: str, pre: Any, normalizer: Any = None, *, trained_with: Any = None) -> tokenizers.Tokenizer:
    """A tokenizer that was trained on the corpus; with `trained_with` another pre-tokenizer than it has afterwards."""
    classes: dict[str, Any] = {"BPE": models.BPE, "Unigram": models.Unigram, "WordPiece": models.WordPiece}
    backend = tokenizers.Tokenizer(classes[kind]() if kind == "Unigram" else classes[kind](unk_token="<unk>"))
    special = ["<unk>", "<s>", "<|im_start|>", "<|im_end|>"]
    makers: dict[str, Any] = {
        "BPE": lambda: trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False),
        "Unigram": lambda: trainers.UnigramTrainer(
            vocab_size=600, special_tokens=special, unk_token="<unk>", show_progress=False
        ),
        "WordPiece": lambda: trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False),
    }
    if normalizer is not None:
        backend.normalizer = normalizer
    if (first := trained_with or pre) is not None:
        backend.pre_tokenizer = first
    backend.train_from_iterator([*SCRIPTS, *CODE, WORDS], makers[kind]())
    if trained_with is not None:
        backend.pre_tokenizer = pre
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "<|im_end|>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", pair="<s> $A <|im_end|> $B <|im_end|>", special_tokens=ids
    )
    return backend


def _words(rules: PreTokenizer) -> tokenizers.Tokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _trained("BPE", pre_tokenizers.Sequence([*splits, byte_level]), normalizers.NFC() if rules.nfc else None)


def _metaspace(**options: Any) -> Any:
    return pre_tokenizers.Metaspace(SPACE, **options)


def _sentencepiece(normalizer: Any, pre: Any) -> tokenizers.Tokenizer:
    return _trained("BPE", pre, normalizer, trained_with=_metaspace(prepend_scheme="never", split=True))


MARKS = normalizers.Replace(" ", SPACE)
BACKENDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    **{
        f"split {name}": (lambda rules=rules: _words(rules))
        for rules, name in {rules: name for name, rules in PRE_TOKENIZERS.items()}.items()
        if not rules.marks_spaces
    },
    "byte level": lambda: _trained("BPE", pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte level with prefix": lambda: _trained("BPE", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace always": lambda: _trained("Unigram", _metaspace(prepend_scheme="always")),
    "metaspace first": lambda: _trained("Unigram", _metaspace(prepend_scheme="first")),
    "xlm-roberta": lambda: _trained(
        "Unigram", pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), _metaspace()]), normalizers.NFKC()
    ),
    "bert": lambda: _trained("WordPiece", pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    "gguf llama": lambda: _sentencepiece(normalizers.Sequence([normalizers.Prepend(SPACE), MARKS]), None),
    "gguf gemma": lambda: _sentencepiece(MARKS, None),
    "llama": lambda: _sentencepiece(None, _metaspace(prepend_scheme="first", split=False)),
    "legacy llama": lambda: _sentencepiece(None, _metaspace(prepend_scheme="always", split=False)),
    "gemma": lambda: _sentencepiece(MARKS, pre_tokenizers.Split(" ", behavior="merged_with_previous")),
}
WITHOUT_CUTS = ("gguf llama", "split exaone-moe", "split superbpe")
"""A space before each text, and pieces with several words."""


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer(BACKENDS[name]())


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return GGUFSource(smollm2_gguf, "smollm2").tokenizer()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few words have several parts."""
    monkeypatch.setattr(text_encoding, "MIN_PART", 4)
    monkeypatch.setattr(text_encoding, "CHARACTERS_PER_TOKEN", 1)


texts = st.lists(
    st.tuples(st.sampled_from(FRAGMENTS) | st.text(max_size=6), st.sampled_from(SEPARATORS)), min_size=2, max_size=25
).map(lambda pairs: "".join(word + separator for word, separator in pairs))


def check_parts(tokenizer: Tokenizer, text: str, num_tokens: int) -> int:
    """Compare the tokens of the beginning and of the end of a text with those of the whole text; returns how often less
    than the whole was encoded."""
    num_partial = 0
    for adds_special in (False, True):
        expected = tokenizer.encode(text, add_special_tokens=adds_special)
        for from_end in (False, True):
            ids, is_whole = tokenizer.encode_part(text, num_tokens, from_end=from_end, add_special_tokens=adds_special)
            assert len(ids) >= min(num_tokens, len(expected))
            assert ids == (expected[len(expected) - len(ids) :] if from_end else expected[: len(ids)])
            assert not is_whole or ids == expected
            num_partial += not is_whole
    return num_partial


@pytest.mark.parametrize("name", BACKENDS)
def test_the_parts_of_a_text_have_the_tokens_of_the_whole(name: str) -> None:
    tokenizer = tokenizer_of(name)

    @settings(max_examples=40)
    @given(texts, st.integers(1, 16))
    def check(text: str, num_tokens: int) -> None:
        check_parts(tokenizer, text, num_tokens)

    check()
    assert tokenizer.can_cut == (name not in WITHOUT_CUTS)
    assert check_parts(tokenizer, "a b c d e f " * 20, 9) == 4 * tokenizer.can_cut


@settings(max_examples=60)
@given(texts, st.integers(1, 16))
def test_the_default_model(smollm2: Tokenizer, text: str, num_tokens: int) -> None:
    check_parts(smollm2, text, num_tokens)


@settings(max_examples=80)
@given(st.lists(st.tuples(texts, st.booleans()), min_size=1, max_size=6), st.integers(1, 16))
def test_content_of_a_chat_is_cut_like_text(smollm2: Tokenizer, turns: list[tuple[str, bool]], num_tokens: int) -> None:
    prompt = join_marked([template_text(text) if is_template else MarkedText(text) for text, is_template in turns])
    check_parts(smollm2, prompt, num_tokens)


@pytest.mark.parametrize("name", ["split qwen2", "xlm-roberta", "bert", "gguf gemma", "byte level with prefix"])
def test_pairs_and_first_tokens_equal_those_of_whole_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(name)
    whole = Tokenizer(tokenizer.backend)
    monkeypatch.setattr(whole._cutter, "can_cut", False)

    @settings(max_examples=40)
    @given(texts, st.none() | texts, st.integers(4, 40))
    def check(text: str, second: str | None, num_tokens: int) -> None:
        assert tokenizer.first_tokens(text, num_tokens) == whole.first_tokens(text, num_tokens)
        expected, found = (each.encode_pair(text, second, num_tokens) for each in (whole, tokenizer))
        # Which one of two texts is longer is not known if only a part of each was tokenized.
        are_long = second is not None and all(len(whole.encode(each)) > num_tokens for each in (text, second))
        assert found == expected or are_long
        assert len(found[0]) == len(expected[0]) <= num_tokens

    check()


def test_a_long_text_is_not_tokenized_to_its_end(smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    text = "several words of a text " * 10_000
    for from_end in (False, True):
        ids, is_whole = smollm2.encode_part(text, 500, from_end=from_end)
        assert len(ids) >= 500
        assert not is_whole
    assert sum(encoded) < 10_000
    assert smollm2.encode_part(text, 10**6)[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\\w+ \\w+"), "isolated")),
        lambda backend: backend.add_tokens([AddedToken("two words")]),
        lambda backend: backend.add_tokens([AddedToken("word", rstrip=True)]),
        lambda backend: backend.add_tokens([AddedToken(" word", single_word=True)]),
    ],
    ids=["normalizer", "pre-tokenizer", "token with a space", "token that takes a space", "token between spaces"],
)
def test_texts_are_not_cut_where_tokens_may_cross_the_cut(change: Callable[[tokenizers.Tokenizer], object]) -> None:
    backend = tokenizers.Tokenizer.from_str(tokenizer_of("split qwen2").backend.to_str())
    change(backend)
    tokenizer = Tokenizer(backend)
    assert not tokenizer.can_cut
    check_parts(tokenizer, "it has two words and a word " * 3, 2)


def test_a_vocabulary_with_joined_words_is_not_cut() -> None:
    backend = _trained("BPE", _metaspace(split=False))
    assert any("a▁" in token or "e▁" in token for token in backend.get_vocab())
    assert not Tokenizer(backend).can_cut


def test_other_threads_run_while_a_text_is_tokenized(smollm2: Tokenizer) -> None:
    text = "several words of a text " * 40_000
    num_steps = 0
    is_done = threading.Event()

    def count() -> None:
        nonlocal num_steps
        while not is_done.wait(0.0005):
            num_steps += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        ids = text_encoding.encode_text(smollm2.backend, text, add_special_tokens=False).ids
        steps_of_encode, num_steps = num_steps, 0
        smollm2.decode(ids * 4)
        steps_of_decode = num_steps
    finally:
        is_done.set()
        thread.join()
    assert min(steps_of_encode, steps_of_decode) > 5


def test_one_module_encodes_with_the_library() -> None:
    """Any other call could stop all threads; see `text_encoding.encode_text`."""
    root = Path(chairlift.__file__).parent
    calls = re.compile(r"backend\.encode|\.encode_batch|tokenizers\.Tokenizer\.encode")
    callers = {
        str(file.relative_to(root)) for file in root.rglob("*.py") if calls.search(file.read_text(encoding="utf-8"))
    }
    assert callers == {"loading/text/text_encoding.py"}
