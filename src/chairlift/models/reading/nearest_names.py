"""Messages with the reason why an architecture is not supported, and the names of the supported ones."""

from __future__ import annotations

import re
from collections.abc import Collection
from os.path import commonprefix
from typing import Final

SUFFIX: Final = re.compile(r"(For(CausalLM|ConditionalGeneration|MaskedLM|SequenceClassification)|LMHeadModel|Model)$")
FIRST_WORD: Final = re.compile(r"(?i:gpt).*|[A-Z]*[a-z]+|[A-Z]+")
"""The first word of a name; all of it after GPT, because models of many families have names with it."""
REASONS: Final = (
    ("vl|vision|visual|image|llava|pixtral|idefics|paligemma|mllama|clip|siglip|florence|janus", "it reads images"),
    ("audio|speech|whisper|voxtral|omni|wav2vec", "it reads audio"),
    ("t5|bart|marian|pegasus|prophetnet|encoderdecoder", "it has an encoder besides its decoder"),
    ("deepseekv3-?2|deepseek32|dsa$", "its attention is sparse: an indexer chooses the keys of a query"),
    ("^mamba2$", "it has no layer with attention, and at least 1 is required (use a hybrid model such as Granite 4 H)"),
    (
        "amba|rwkv|recurrent|xlstm|plamo2|retnet|minimax|kimilinear",
        "its recurrent layers are of a kind that is not supported",
    ),
)
"""Patterns of the names of unsupported architectures, with the reason."""


def describe_unsupported(name: str, supported: Collection[str]) -> str:
    """Return the part of a message that gives the reason, if one is known, and the supported names.

    It suggests the name that was meant instead, if only its spelling differs, or the nearest supported name first.
    """
    if misspelt := next((other for other in supported if _letters(other) == _letters(name)), None):
        return f"is not supported, because its name is unknown; did you mean {misspelt}?"
    reason = next((f", because {reason}" for pattern, reason in REASONS if re.search(pattern, _stem(name))), "")
    nearest = nearest_name(name, supported)
    hint = "" if nearest is None else f"the nearest supported architecture is {nearest}; "
    names = ", ".join(sorted(supported))
    return f"is not supported{reason}; {hint}use a model whose architecture is supported: {names}"


def nearest_name(name: str, supported: Collection[str]) -> str | None:
    """Return the name that begins with the same word and most of the same letters, as Qwen2 for Qwen2VL, or None."""
    relatives = (other for other in sorted(supported, key=len) if _first_word(other) == _first_word(name))
    return max(relatives, key=lambda other: len(commonprefix((_stem(name), _stem(other)))), default=None)  # noqa: RUF071


def _stem(name: str) -> str:
    return SUFFIX.sub("", name).lower()


def _first_word(name: str) -> str:
    found = FIRST_WORD.match(SUFFIX.sub("", name))
    return name if found is None else found[0].lower()


def _letters(name: str) -> list[str]:
    """The letters and digits of a name, which two spellings of it have in common."""
    return sorted(filter(str.isalnum, name.lower()))
