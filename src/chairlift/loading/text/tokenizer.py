"""Tokenizer: conversion between text and token ids, with the chat template of the model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import tokenizers
from tokenizers import normalizers, processors

from chairlift.errors import RequestError
from chairlift.loading.text.added_token_guard import AddedTokenGuard
from chairlift.loading.text.chat_template import ChatTemplate
from chairlift.loading.text.marked_text import MarkedText, is_template_text, unmarked
from chairlift.loading.text.text_encoding import TextCutter, encode_text, token_span
from chairlift.loading.text.tokenizer_class import SPACE, steps

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LONG_DECODE: Final = 256  # tokens, which take about 0.1 ms
MAX_TOKEN_ID: Final = (1 << 32) - 1  # The library raises an error for larger ids.


def room_for_texts(max_tokens: int, num_others: int) -> int:
    """The number of tokens that the texts of a prompt may have, which has `num_others` besides.

    Raises:
        RequestError: it is less than 1.
    """
    if max_tokens <= num_others:
        raise RequestError(
            f"truncate_prompt_tokens={max_tokens} leaves no room for the texts: the prompt of this model has "
            f"{num_others} tokens without them",
            "truncate_prompt_tokens",
        )
    return max_tokens - num_others


class Tokenizer:
    """A tokenizer and its chat template. Safe to use from several threads.

    Args:
        backend: a tokenizer of the `tokenizers` library, whose truncation and padding are switched off.
        special_tokens: role ("bos_token", "eos_token", ...) -> text. Texts that are not tokens are ignored.
        chat_template: the source of the Jinja2 template, or the sources by name; None or nothing for no template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = {
            role: text for role, text in (special_tokens or {}).items() if backend.token_to_id(text) is not None
        }
        self.bos_token_id = self._role("bos_token")
        self.eos_token_id = self._role("eos_token")
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._token_to_bytes = make_token_to_bytes(backend)
        self.chat_template = ChatTemplate(chat_template, self.special_tokens) if chat_template else None

    def lower_case(self) -> None:
        """Lower the case of texts before they are encoded, unless the tokenizer does so already."""
        own = self.backend.normalizer
        if not any(step["type"] == "Lowercase" for step in steps(own)):
            lowers = normalizers.Lowercase()
            self.backend.normalizer = lowers if own is None else normalizers.Sequence([lowers, own])

    def tokens_from(self, first_id: int) -> list[str]:
        """The tokens whose ids are at least `first_id`, such as those that have no row in the embedding of a model."""
        num_ids = max(self.vocab_size, *(token_id + 1 for token_id in self._added), 0)
        found = map(self.id_to_token, range(first_id, num_ids))
        return [token for token in found if token is not None]

    def has_vocabulary_of(self, other: Tokenizer, num_rows: int) -> bool:
        """Whether both tokenizers have the same tokens with ids below `num_rows`."""
        vocabularies = (each.backend.get_vocab(with_added_tokens=True) for each in (self, other))
        ours, theirs = ({pair for pair in each.items() if pair[1] < num_rows} for each in vocabularies)
        return ours == theirs

    def _role(self, role: str) -> int | None:
        return self.token_to_id(self.special_tokens[role]) if role in self.special_tokens else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text. Spellings of added tokens become these tokens, except in the content of a MarkedText.

        Args:
            text: a plain string, or a rendered chat template as MarkedText.
            add_special_tokens: whether to add the model's tokens for the beginning and the end of a text.
        """
        if isinstance(text, MarkedText) and not is_template_text(text):
            return self.guard.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encode_text(self.backend, unmarked(text), add_special_tokens=add_special_tokens).ids
        return ids

    def encode_part(
        self, text: str, num_tokens: int, *, from_end: bool = False, add_special_tokens: bool = True
    ) -> tuple[list[int], bool]:
        """Encode at least `num_tokens` tokens at the beginning or at the end of a text, if it has as many.

        Of a long text the rest is not tokenized, unless no cut is certain (see TextCutter).

        Returns:
            The first or the last tokens that `encode` returns, and whether they are all of them.
        """
        encoded: list[list[int]] = []
        length = num_found = 0
        for part in self._cutter.parts(text, num_tokens, from_end=from_end):
            if len(part) == len(text):
                return self.encode(text, add_special_tokens=add_special_tokens), True
            encoded.append(self.encode(part, add_special_tokens=False))
            length, num_found = length + len(part), num_found + len(encoded[-1])
            if num_found >= num_tokens:
                break
        is_whole = length == len(text)
        before, after = self.guard.frame if add_special_tokens else ([], [])
        ids = [token_id for part_ids in (reversed(encoded) if from_end else encoded) for token_id in part_ids]
        return [*before * (is_whole or not from_end), *ids, *after * (is_whole or from_end)], is_whole

    def first_tokens(self, text: str, max_tokens: int) -> str:
        """The text up to the end of its token number `max_tokens`, or the whole text if it has fewer tokens."""
        start = end = num_found = 0
        for part in self._cutter.parts(text, max_tokens):
            encoding = encode_text(self.backend, part, add_special_tokens=False, has_offsets=True)
            if (num_kept := min(len(encoding), max_tokens - num_found)) > 0:
                end = start + token_span(encoding, num_kept - 1)[1]
            if len(encoding) > num_kept:
                return text[:end]
            start, num_found = start + len(part), num_found + num_kept
        return text

    def encode_pair(
        self,
        text: str,
        second: str | None = None,
        max_tokens: int | None = None,
        *,
        add_special_tokens: bool = True,
        cuts_start: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Encode a text, or two texts with the model's tokens between them, for a vector or a score.

        Args:
            max_tokens: both texts and the tokens that the model adds have at most this number of tokens. The longer
                text is cut off, and both if they have the same length, as by `longest_first` of transformers.
            cuts_start: texts are cut off at their beginning instead of their end.

        Returns:
            The tokens and their types.

        Raises:
            RequestError: as `room_for_texts`.
        """
        room = None
        if max_tokens is not None:
            num_added = self.backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
            room = room_for_texts(max_tokens, num_added)
        first, length = self._part_encoding(text, room, cuts_start)
        other, other_length = (None, 0.0) if second is None else self._part_encoding(second, room, cuts_start)
        if room is not None:
            most, most_other = _longest_first(length, other_length, room)
            first.truncate(most, direction="left" if cuts_start else "right")
            if other is not None:
                other.truncate(most_other, direction="left" if cuts_start else "right")
        encoded = self.backend.post_process(first, other, add_special_tokens)
        return encoded.ids, encoded.type_ids

    def _part_encoding(self, text: str, max_tokens: int | None, from_end: bool) -> tuple[tokenizers.Encoding, float]:
        """The encoding of at least `max_tokens` tokens at the beginning or the end of a text, without tokens that the
        model adds, and the length of the text in tokens, which is infinite if not all of it was encoded. None for all
        tokens."""
        parts = [text] if max_tokens is None else self._cutter.parts(text, max_tokens, from_end=from_end)
        found, num_characters = tokenizers.Encoding(), 0
        for part in parts:
            encoding, num_characters = (
                encode_text(self.backend, part, add_special_tokens=False),
                num_characters + len(part),
            )
            pieces = [encoding, found] if from_end else [found, encoding]
            found = tokenizers.Encoding.merge(pieces, growing_offsets=False) if len(found) else encoding
            if max_tokens is not None and len(found) >= max_tokens:
                break
        return found, len(found) if num_characters == len(text) else math.inf

    @cached_property
    def _cutter(self) -> TextCutter:
        return TextCutter(self.backend)

    @property
    def can_cut(self) -> bool:
        """Whether `encode_part` tokenizes only the beginning or the end of a long text; see TextCutter."""
        return self._cutter.can_cut

    @cached_property
    def guard(self) -> AddedTokenGuard:
        """The guard that prevents added tokens in the content of chat prompts."""
        return AddedTokenGuard(self.backend)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode token ids. Ids outside the vocabulary are ignored, and invalid UTF-8 becomes U+FFFD."""
        ids = list(token_ids)
        if len(ids) < LONG_DECODE:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        # Of both calls only this one permits that other threads run Python.
        return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry, or None if there is no such entry."""
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of an id, or None if there is no such entry."""
        return self.backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, or b"" for an id outside the vocabulary.

        The bytes of all tokens of a text, joined, are the UTF-8 of the normalized text (with SentencePiece's leading
        space). A single token may begin or end inside a character. The bytes of an added token are its text.
        """
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None
        return b"" if token is None else self._token_to_bytes(token)

    @cached_property
    def max_token_bytes(self) -> int:
        """The number of bytes of the longest token, at least 1.

        A normalized text of n bytes has at least n / max_token_bytes tokens, unless the tokenizer drops characters or
        fuses them to one unknown token.
        """
        ids = self.backend.get_vocab(with_added_tokens=True).values()
        return max((len(self.token_bytes(token_id)) for token_id in ids), default=0) or 1

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def is_special(self, text: str) -> bool:
        """Whether a text is one special token, which `skip_special_tokens` omits."""
        return self.token_to_id(text) in self.special_token_ids

    def special_tokens_in(self, text: str) -> list[str]:
        """The special tokens that occur in a text."""
        ids = self.special_token_ids.intersection(self.encode(text, add_special_tokens=False))
        return [token for token in map(self.id_to_token, ids) if token and token in text]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> MarkedText:
        """Render the prompt of a conversation; see ChatTemplate.render for the options.

        Raises:
            RequestError: the model has no chat template, or the template rejects the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "messages: this model has no chat template; send the rendered prompt to the completions API", "messages"
            )
        return self.chat_template.render(messages, **options)


def _longest_first(length: float, other: float, room: int) -> tuple[int, int]:
    """The numbers of tokens of two texts that are kept, as by `longest_first` of the library.

    Of two texts of infinite length the second one counts as longer.
    """
    if length + other <= room:
        return int(length), int(other)
    shorter = int(min(length, other, room))
    if shorter <= room - shorter:
        return (shorter, room - shorter) if length <= other else (room - shorter, shorter)
    half = (room // 2, room - room // 2)
    return half if length <= other else half[::-1]


def set_bos_and_eos(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make `encode` add `bos` before and `eos` after a text; None adds no token."""
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    special = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def make_token_to_bytes(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return a function from a vocabulary entry to its bytes, according to the tokenizer's decoder.

    Byte-level BPE writes each byte as a character of GPT-2's alphabet; SentencePiece writes a space as ▁ and, with byte
    fallback, a lone byte as <0xNN>. Other entries are their own text.
    """
    found = list(steps(backend.decoder))
    if any(step["type"] == "ByteLevel" for step in found):
        return _byte_level
    marks_spaces = any(_marks_spaces(step) for step in found)
    has_bytes = any(step["type"] == "ByteFallback" for step in found)

    def sentencepiece(token: str) -> bytes:
        if has_bytes and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return (token.replace(SPACE, " ") if marks_spaces else token).encode()

    return sentencepiece


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
        return bytes(map(ALPHABET.__getitem__, token))
    except KeyError:  # An entry with other characters is text.
        return token.encode()
