"""Messages that say why an architecture is not supported, and name the supported one that is nearest to it."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import SequenceMatcher, get_close_matches
from typing import Final

SUFFIX: Final = re.compile(r"(For(CausalLM|ConditionalGeneration)|LMHeadModel|Model)$")
MIN_SIMILARITY: Final = 0.6
"""The similarity of names from which one is suggested, if no supported architecture is of the same family."""
MISSPELT_SIMILARITY: Final = 0.9
"""The similarity of whole names from which an unknown one is taken for a misspelt one."""
REASONS: Final = (
    ("vl|vision|visual|image|llava|pixtral|idefics|paligemma|mllama|clip|siglip|florence|janus", "it reads images"),
    ("audio|speech|whisper|voxtral|omni|wav2vec", "it reads audio"),
    ("t5|bart|marian|pegasus|prophetnet|encoderdecoder", "it has an encoder besides its decoder"),
    ("^mamba2$", "it has no layer with attention, and at least 1 is required (use a hybrid model such as Granite 4 H)"),
    (
        "amba|rwkv|recurrent|xlstm|plamo2|retnet|minimax|kimilinear",
        "its recurrent layers are of a kind that is not supported",
    ),
)
"""Patterns of the names of unsupported architectures, with the reason."""


def describe_unsupported(name: str, supported: Collection[str]) -> str:
    """Return the part of a message that gives the reason and the nearest supported name, or else all of them."""
    reason = next((reason for pattern, reason in REASONS if re.search(pattern, _stem(name))), None)
    misspelt = [] if reason else get_close_matches(name, supported, 1, MISSPELT_SIMILARITY)
    if misspelt:
        hint = f"did you mean {misspelt[0]}?"
    elif nearest := nearest_name(name, supported):
        hint = f"the nearest supported architecture is {nearest}"
    else:
        hint = f"supported: {', '.join(sorted(supported))}"
    return f"is not supported, because {reason or 'its name is unknown'}; {hint}"


def nearest_name(name: str, supported: Collection[str]) -> str | None:
    """Return the name of the same family, such as Qwen3 for Qwen3VL, or else a similar name, or None."""
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
