"""Words that an answer must not complete, as the tokens that would complete them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chairlift.kernels.sampling import IntArray

ANY = -1


class BadWords:
    """The words of one request.

        before[i]   ANY ANY a b     word a b c: after "... a b" the token c is masked
        last[i]     c

    Args:
        words: token ids, at least one each.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.max_before = max(len(word) for word in words) - 1
        self._last: IntArray = np.array([word[-1] for word in words], dtype=np.int64)
        self._before: IntArray = np.full((len(words), self.max_before), ANY, dtype=np.int64)
        for line, word in zip(self._before, words, strict=True):
            line[self.max_before - len(word) + 1 :] = word[:-1]

    def completing(self, answer: Sequence[int]) -> IntArray:
        """The tokens that would complete a word.

        Args:
            answer: its last `max_before` tokens, or all if there are fewer.
        """
        if not self.max_before:
            return self._last
        tail = np.full(self.max_before, ANY - 1, dtype=np.int64)
        tail[self.max_before - len(answer) :] = answer
        is_next = ((self._before == tail) | (self._before == ANY)).all(axis=1)
        return np.compress(is_next, self._last)
