"""Conversion of vocabulary entries to bytes, for the decoders in Hugging Face folders."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from chairlift.loading.text.tokenizer import Tokenizer, make_token_to_bytes

SENTENCEPIECE = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize(
    ("decoder", "token", "expected"),
    [
        (decoders.Sequence([decoders.ByteLevel()]), "Ġa", b" a"),
        (decoders.ByteLevel(), "a b", b"a b"),
        (decoders.Metaspace(), "▁a", b" a"),
        (decoders.Metaspace(), "<0x41>", b"<0x41>"),
        (
            decoders.Sequence([SENTENCEPIECE]),
            "▁é",
            " é".encode(),
        ),
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
