"""PromptLookup: proposes the tokens that followed an earlier occurrence of a request's last tokens."""

from __future__ import annotations

from typing import Final, NamedTuple

MAX_CANDIDATES: Final = 8
"""Maximum number of earlier occurrences that are compared for one proposal, the latest first."""


class Proposal(NamedTuple):
    """Draft tokens, and the number of last tokens that their source has in common with the request."""

    token_ids: list[int]
    match_length: int


class PromptLookup:
    """An incremental index of the n-grams in the prompt and output of one request (prompt lookup decoding; Saxena,
    2023). The occurrence with the longest common context is chosen, among equal ones the latest.

        tokens      a b c d e f g h a b c
                          ^ source    ^ last n-gram "a b c", n = 3
        proposal    d e f g h a b c

    An occurrence is found by a hash of its last `min_match` tokens, and each occurrence links to the one before it, as
    in LZ77. A proposal therefore takes constant time, and each token is indexed once.

    Args:
        min_match: the number of last tokens that an occurrence must have in common, at least 1.
        max_match: the number of tokens that are compared at most.
    """

    __slots__ = ("_latest", "_max_match", "_min_match", "_previous")

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        # Ends of n-grams: the latest one by n-gram, and for each end the end of the n-gram's occurrence before it.
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous: list[int] = [-1] * min_match

    def propose(self, token_ids: list[int], max_tokens: int) -> Proposal | None:
        """The tokens after the best earlier occurrence of the last tokens, at most `max_tokens`; None if there is none.

        Args:
            token_ids: all tokens of the request, which begin with the tokens of the calls before.
        """
        self._index(token_ids)
        best, best_length = -1, self._min_match - 1
        end = self._previous[len(token_ids)] if len(token_ids) >= self._min_match else -1
        for _ in range(MAX_CANDIDATES):
            if end < 0 or best_length == self._max_match:
                break
            length = self._common_length(token_ids, end, best_length)
            if length > best_length:
                best, best_length = end, length
            end = self._previous[end]
        if best < 0:
            return None
        return Proposal(_continuation(token_ids, best, max_tokens), best_length)

    def _index(self, token_ids: list[int]) -> None:
        latest, previous, size = self._latest, self._previous, self._min_match
        for end in range(len(previous), len(token_ids) + 1):
            ngram = tuple(token_ids[end - size : end])
            previous.append(latest.get(ngram, -1))
            latest[ngram] = end

    def _common_length(self, token_ids: list[int], end: int, floor: int) -> int:
        """The number of equal tokens before `end` and before the end of the request, if it exceeds `floor`."""
        limit, size = min(self._max_match, end), len(token_ids)
        if floor >= limit or token_ids[end - floor - 1] != token_ids[size - floor - 1]:
            return 0
        length = self._min_match
        while length < limit and token_ids[end - length - 1] == token_ids[size - length - 1]:
            length += 1
        return length


def _continuation(token_ids: list[int], start: int, max_tokens: int) -> list[int]:
    """The tokens from `start` on; a repetition that reaches the end of the request continues with itself."""
    tokens = token_ids[start : start + max_tokens]
    period = len(token_ids) - start
    while len(tokens) < max_tokens:
        tokens.append(tokens[len(tokens) - period])
    return tokens
