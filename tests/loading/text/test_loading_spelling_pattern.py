"""The expression for many spellings matches the longest one at a position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chairlift.loading.text.added_token_guard import MAX_DEPTH, spelling_pattern

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
