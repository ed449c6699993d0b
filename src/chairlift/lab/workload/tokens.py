"""Tokens where a workload knows only how many there are."""

from __future__ import annotations

import hashlib
from functools import lru_cache


def synthetic_tokens(key: str, count: int, vocab_size: int = 256) -> bytes:
    """`count` token ids below min(vocab_size, 256), decided by `key`; a longer answer begins with the shorter one.

    Other keys have other tokens from the first ones on, so they share no block of a prefix cache. One byte a token: a
    day's trace stays in memory, and `list()` of it holds only ints that CPython has made already.
    """
    tokens = hashlib.shake_128(key.encode()).digest(count)
    return tokens if vocab_size >= 256 else tokens.translate(_remainders(vocab_size))


@lru_cache(maxsize=8)
def _remainders(vocab_size: int) -> bytes:
    return bytes(value % vocab_size for value in range(256))
