"""Tokenizers in Hugging Face folders, the bytes of their tokens, and the expression for many spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_corpus import strings
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chairlift.errors import ModelLoadError, RequestError
from chairlift.loading.text.added_token_guard import MAX_DEPTH, spelling_pattern
from chairlift.loading.text.hf_tokenizer import folder_tokenizer
from chairlift.loading.text.tokenizer import Tokenizer, make_token_to_bytes

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def make(folder: Path, **options: Any) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 400 tokens, and let transformers save it to `folder`."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(strings(200), trainer)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **options
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_ids_equal_transformers(tmp_path: Path, flags: dict[str, bool]) -> None:
    make(tmp_path, chat_template=TEMPLATE, **flags)
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = folder_tokenizer(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (0, 1, len(oracle))
    for text in strings(200):
        assert ours.encode(text) == oracle.encode(text)
        ids = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.render_chat(messages) == oracle.apply_chat_template(messages, tokenize=False)
    ids = ours.encode(ours.render_chat(messages), add_special_tokens=False)
    assert ids == oracle.encode("<s>[user]hi", add_special_tokens=False)


def test_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    make(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert 2 < len(folder_tokenizer(tmp_path).encode("The quick brown fox")) < 64


def test_chat_template_locations(tmp_path: Path) -> None:
    make(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    assert not folder_tokenizer(tmp_path).has_chat_template
    with pytest.raises(RequestError, match="no chat template") as caught:
        folder_tokenizer(tmp_path).render_chat([])
    assert caught.value.param == "messages"
    edit(settings, chat_template="config")
    assert folder_tokenizer(tmp_path).render_chat([]) == "config"
    edit(settings, chat_template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "listed"}])
    assert folder_tokenizer(tmp_path).render_chat([]) == "listed"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert folder_tokenizer(tmp_path).render_chat([]) == "file"


def test_special_tokens_of_older_folders(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "unk_token": "<none>"})
    )
    tokenizer = folder_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert "unk_token" not in tokenizer.special_tokens


def test_errors_name_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: is missing. Download it .*skip_tokenizer_init"):
        folder_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").touch()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: is missing.*save_pretrained"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").touch()
    with pytest.raises(
        ModelLoadError, match=r"tokenizer\.json: is missing. The code of the model reads tiktoken\.model"
    ):
        folder_tokenizer(tmp_path)
    make(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text()[:1000])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: cannot be read .*truncated or damaged"):
        folder_tokenizer(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: "):
            folder_tokenizer(tmp_path)


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
NAMED = {
    "rag": "R",
    "tool_use": "{% for m in messages %}T:{{ m.content }};{% endfor %}{{ tools | length }}",
    "default": "{% for m in messages %}D:{{ m.content }};{% endfor %}",
}


@pytest.mark.parametrize("form", ["list", "files"])
def test_named_templates_are_chosen_as_by_transformers(tmp_path: Path, form: str) -> None:
    make(tmp_path)
    if form == "list":
        named = [{"name": name, "template": text} for name, text in NAMED.items()]
        edit(tmp_path / "tokenizer_config.json", chat_template=named)
    else:
        (tmp_path / "additional_chat_templates").mkdir()
        for name, text in NAMED.items():
            file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            (tmp_path / file).write_text(text)
    oracle, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), folder_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    for tools in (None, TOOLS):
        expected = oracle.apply_chat_template(messages, tools=tools, tokenize=False)
        assert ours.render_chat(messages, tools=tools) == expected
    assert ours.chat_template is not None
    assert "tools" in ours.chat_template.variables


def test_without_a_default_the_first_template_is_used(tmp_path: Path) -> None:
    make(tmp_path)
    edit(tmp_path / "tokenizer_config.json", chat_template=[{"name": "rag", "template": "r"}, {"name": "x"}, 1])
    assert folder_tokenizer(tmp_path).render_chat([]) == "r"
    edit(tmp_path / "tokenizer_config.json", chat_template=[])
    assert not folder_tokenizer(tmp_path).has_chat_template


SENTENCEPIECE = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize(
    ("decoder", "token", "expected"),
    [
        (decoders.Sequence([decoders.ByteLevel()]), "Ġa", b" a"),
        (decoders.ByteLevel(), "a b", b"a b"),
        (decoders.Metaspace(), "▁a", b" a"),
        (decoders.Metaspace(), "<0x41>", b"<0x41>"),
        (decoders.Sequence([SENTENCEPIECE]), "▁é", " é".encode()),
        (SENTENCEPIECE, "<0xe9>", b"\xe9"),
        (SENTENCEPIECE, "<0xe9>a", b"<0xe9>a"),
        (decoders.Fuse(), "▁a", "▁a".encode()),
        (None, "Ġa", "Ġa".encode()),
    ],
)
def test_bytes_depend_on_the_decoder(decoder: Any, token: str, expected: bytes) -> None:
    backend = Backend(models.BPE(vocab={token: 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    assert make_token_to_bytes(backend)(token) == expected
    assert Tokenizer(backend).token_bytes(0) == expected
    if decoder is not None and expected.isascii() and not expected.startswith(b" "):
        assert Tokenizer(backend).decode([0]).encode() == expected, "and so does the library"


def test_bytes_of_an_added_token_are_its_text() -> None:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["é▁", "a"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes(1) == "é▁".encode()
    assert tokenizer.max_token_bytes == 5


def test_max_token_bytes_of_an_empty_vocabulary_is_one() -> None:
    assert Tokenizer(Backend(models.BPE())).max_token_bytes == 1


spellings = st.sets(st.text("ab<|.", min_size=1, max_size=6), min_size=1, max_size=12)


@given(spellings, st.text("ab<|.", max_size=30))
def test_longest_spelling_is_matched_at_every_position(strings: set[str], text: str) -> None:
    pattern = spelling_pattern(strings)
    for start in range(len(text)):
        longest = max((string for string in strings if text.startswith(string, start)), key=len, default=None)
        found = pattern.match(text, start)
        assert (found and found[0]) == longest


def test_deeply_nested_strings() -> None:
    strings = {"a" * length + end for length in range(1, 5 * MAX_DEPTH) for end in ("", "b")}
    pattern = spelling_pattern(strings)
    found = pattern.match("a" * 150 + "bc")
    assert found is not None
    assert found[0] == "a" * 150 + "b"


def test_no_spellings() -> None:
    assert spelling_pattern([]).search("anything") is None
