"""Numbers of things in messages."""

from __future__ import annotations

import pytest

from chairlift.counts import are, counted


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1.5, "1.5 tokens"), (10**8, "100000000 tokens")],
)
def test_a_unit_has_its_plural(number: float, text: str) -> None:
    assert counted(number, "token") == text
    assert are(number) == ("is" if number == 1 else "are")
