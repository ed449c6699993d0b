"""GrammarVocabulary: a tokenizer in the form that llguidance requires."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final

from chairlift.loading.text.tokenizer import Tokenizer

SENTINEL: Final = "\x02"


class GrammarVocabulary:
    """The bytes of every token, the special tokens, and the tokenization of text inside an answer.

    The attributes `tokens`, `eos_token_id`, `bos_token_id`, `special_token_ids` and `is_tokenizer_wrapper`, and the
    call are the interface of llguidance.

    Args:
        vocab_size: the width of the model's logits.
        eos_token_id: the token that ends an answer.
        special_only: whether all other tokens are empty, for a compiler that only checks grammars.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int, *, special_only: bool = False) -> None:
        self.eos_token_id = eos_token_id
        self._special = {i for i in tokenizer.special_token_ids if i < vocab_size}
        token_ids = range(vocab_size)
        self.tokens = [b"" if special_only and i not in self._special else tokenizer.token_bytes(i) for i in token_ids]
        self.special_token_ids = sorted(self._special)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Return tokens that spell the text.

        The tokenizer encodes the text. If its tokens would add to the text or contain special tokens, the longest token
        that fits is taken, repeatedly.
        """
        expected = text if isinstance(text, bytes) else text.encode()
        string = expected.decode(errors="replace")
        for encode in (self._encoded, self._encoded_within):
            if self._spells(found := encode(string), expected):
                return found
        return self._greedy(expected)

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encoded_within(self, text: str) -> list[int]:
        """Encode the text as a continuation, because SentencePiece adds a space before the first character."""
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
        """Encode with the longest matching tokens, up to the first byte that no token begins with."""
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
