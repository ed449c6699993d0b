"""A tokenizer as llguidance wants it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final

from chairlift.loading.text.tokenizer import Tokenizer

SENTINEL: Final = "\x02"


class Vocabulary:
    """The bytes of every token, which ones no text may spell, and how a text within an answer is tokenized.

    Args:
        vocab_size: of the model's logits.
        eos_token_id: what ends an answer.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._special = {i for i in tokenizer.special_token_ids if i < vocab_size}
        self.special_token_ids = sorted(self._special)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens whose bytes are those of the text: the tokenizer's own, or, where it would add to the text or find
        special tokens in it, the longest that fit, one after the other."""
        expected = text if isinstance(text, bytes) else text.encode()
        string = expected.decode(errors="replace")
        for encode in (self._encoded, self._encoded_within):
            if self._spells(found := encode(string), expected):
                return found
        return self._greedy(expected)

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encoded_within(self, text: str) -> list[int]:
        """As it stands behind something else: SentencePiece puts a space before the beginning of a text."""
        token_ids = self._encoded(SENTINEL + text)
        lengths = accumulate(len(self._bytes(token_id)) for token_id in token_ids)
        total = sum(len(self._bytes(token_id)) for token_id in token_ids)
        start = next((i + 1 for i, end in enumerate(lengths) if total - end == len(text.encode())), 0)
        return token_ids[start:]

    def _bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def _spells(self, token_ids: Sequence[int], text: bytes) -> bool:
        return self._special.isdisjoint(token_ids) and b"".join(map(self._bytes, token_ids)) == text

    def _greedy(self, text: bytes) -> list[int]:
        """Up to the first byte that no token begins with."""
        found: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._token_of), None)
            if end is None:
                break
            found.append(self._token_of[text[at:end]])
            at = end
        return found

    @cached_property
    def _token_of(self) -> dict[bytes, int]:
        return {token: i for i, token in enumerate(self.tokens) if token and i not in self._special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._token_of), default=1)
