"""PromptLookup finds the occurrence with the longest common context, as a search through all tokens does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.speculation.prompt_lookup import MAX_CANDIDATES, PromptLookup, Proposal


def searched(token_ids: list[int], min_match: int, max_match: int, max_tokens: int) -> Proposal | None:
    """The specification: compare the latest occurrences of the last tokens, and repeat what follows the best one."""
    size = len(token_ids)
    tail = token_ids[size - min_match :]
    ends = [end for end in range(min_match, size) if token_ids[end - min_match : end] == tail]
    best, best_length = None, 0
    for end in list(reversed(ends))[:MAX_CANDIDATES]:
        length = 0
        while length < min(max_match, end) and token_ids[end - length - 1] == token_ids[size - length - 1]:
            length += 1
        if length > best_length:
            best, best_length = end, length
    if best is None:
        return None
    tokens = list(token_ids)
    while len(tokens) < size + max_tokens:
        tokens.append(tokens[best + len(tokens) - size])
    return Proposal(tokens[size:], best_length)


@given(
    token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    min_match=st.integers(1, 4),
    extra_match=st.integers(0, 6),
    max_tokens=st.integers(1, 8),
    first=st.integers(1, 60),
)
@settings(max_examples=400, deadline=None)
def test_a_proposal_is_the_result_of_a_full_search(
    token_ids: list[int], min_match: int, extra_match: int, max_tokens: int, first: int
) -> None:
    lookup = PromptLookup(min_match, min_match + extra_match)
    for size in range(min(first, len(token_ids)), len(token_ids) + 1):
        known = token_ids[:size]
        expected = searched(known, min_match, min_match + extra_match, max_tokens) if size > min_match else None
        assert lookup.propose(known, max_tokens) == expected


def test_a_repetition_continues_beyond_the_known_tokens() -> None:
    assert PromptLookup(2, 8).propose([1, 2, 3, 1, 2], 7) == Proposal([3, 1, 2, 3, 1, 2, 3], 2)


def test_the_longer_match_wins_over_the_later_one() -> None:
    tokens = [1, 2, 3, 4, 9, 9, 2, 3, 5, 9, 9, 1, 2, 3]
    assert PromptLookup(2, 8).propose(tokens, 1) == Proposal([4], 3)


def test_without_an_occurrence_there_is_no_proposal() -> None:
    lookup = PromptLookup(2, 8)
    assert lookup.propose([1], 4) is None
    assert lookup.propose([1, 2, 3, 4], 4) is None
