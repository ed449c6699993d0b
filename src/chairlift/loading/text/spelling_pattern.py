"""A regular expression that matches the longest of many strings in time independent of their number."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import groupby, takewhile
from typing import Final

MAX_DEPTH: Final = 40
"""The maximum depth of nested groups in the expression. Deeper strings become alternatives of one group."""


def spelling_pattern(spellings: Collection[str]) -> re.Pattern[str]:
    """Return an expression that matches the longest spelling at a position, or nothing if there are no spellings.

    It is a trie, so the time at one position depends on the length of the spellings, and not on their number.
    """
    return re.compile(_alternatives(sorted(set(spellings)), 0) if spellings else r"(?!)")


def _alternatives(spellings: list[str], depth: int) -> str:
    """Return an expression for sorted, distinct strings."""
    if depth == MAX_DEPTH:
        return _group([re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True)])
    optional = "?" if spellings[0] == "" else ""
    branches = []
    for _, group in groupby(spellings[1:] if optional else spellings, key=lambda spelling: spelling[0]):
        same = list(group)
        prefix = _common_prefix(same[0], same[-1])
        rest = [spelling[len(prefix) :] for spelling in same]
        branches.append(re.escape(prefix) + (_alternatives(rest, depth + 1) if len(rest) > 1 else ""))
    return _group(branches) + optional


def _common_prefix(first: str, last: str) -> str:
    """Return the common prefix of all strings between these two in sorted order."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(left for left, _ in shared)


def _group(branches: list[str]) -> str:
    return f"(?:{'|'.join(branches)})"
