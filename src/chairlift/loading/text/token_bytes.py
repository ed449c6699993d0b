"""The bytes of a vocabulary entry, for each kind of tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import tokenizers

SPACE: Final = "▁"
BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def make_token_to_bytes(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return a function from a vocabulary entry to its bytes, according to the tokenizer's decoder.

    Byte-level BPE writes each byte as a character of GPT-2's alphabet; SentencePiece writes a space as ▁ and, with byte
    fallback, a lone byte as <0xNN>. Other entries are their own text.
    """
    steps = list(_steps(backend))
    if any(step["type"] == "ByteLevel" for step in steps):
        return _byte_level
    marks_spaces = any(_marks_spaces(step) for step in steps)
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)

    def sentencepiece(token: str) -> bytes:
        if has_bytes and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return (token.replace(SPACE, " ") if marks_spaces else token).encode()

    return sentencepiece


def _steps(backend: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield the steps of the decoder, including those of nested sequences."""
    pending = [] if backend.decoder is None else [json.loads(backend.decoder.__getstate__())]
    while pending:
        step = pending.pop()
        pending += step.get("decoders", [])
        yield step


def _marks_spaces(step: dict[str, Any]) -> bool:
    return step.get("replacement") == SPACE or (step.get("pattern") == {"String": SPACE} and step.get("content") == " ")


def _alphabet() -> dict[str, int]:
    """Return the byte of each of GPT-2's characters: printable Latin-1 unchanged, the others from U+0100 on, in
    order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


ALPHABET: Final = _alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(ALPHABET[character] for character in token)
    except KeyError:  # An entry with other characters is text.
        return token.encode()
