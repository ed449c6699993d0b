"""Messages that name the supported architecture that is nearest to an unsupported one."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import SequenceMatcher
from typing import Final

SUFFIX: Final = re.compile(r"(For(CausalLM|ConditionalGeneration)|LMHeadModel|Model)$")
MIN_SIMILARITY: Final = 0.6
"""The similarity of names from which one is suggested, if no supported architecture is of the same family."""


def describe_supported(name: str, supported: Collection[str]) -> str:
    """Return the part of a message that lists the supported architectures, the nearest one first by itself."""
    nearest = nearest_name(name, supported)
    hint = "" if nearest is None else f"; the nearest supported architecture is {nearest}"
    return f"supported: {', '.join(sorted(supported))}{hint}"


def nearest_name(name: str, supported: Collection[str]) -> str | None:
    """Return the name of the same family, such as Qwen3 for Qwen3Next, or else a similar name, or None."""
    ranked = sorted(supported, key=lambda other: (_similarity(name, other), other), reverse=True)
    relatives = [other for other in ranked if _family(other) == _family(name)]
    similar = [other for other in ranked if _similarity(name, other) >= MIN_SIMILARITY]
    return next(iter((*relatives, *similar)), None)


def _stem(name: str) -> str:
    return SUFFIX.sub("", name).lower()


def _family(name: str) -> str:
    """The letters before the first digit."""
    return re.split(r"\d", _stem(name), maxsplit=1)[0]


def _similarity(name: str, other: str) -> float:
    return SequenceMatcher(None, _stem(name), _stem(other)).ratio()
