"""Which fields of checkpoints may change results if no reader reads them. The lists are in config_keys.json.

Neutral fields have none. A field whose name contains one of the changing words may change results, so it is an error,
unless its value switches it off. Any other field is unknown but harmless, and is named in a warning.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any, Final

_LISTS: Final = json.loads(files(__package__).joinpath("config_keys.json").read_text(encoding="utf-8"))


def _words(lines: list[str]) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


NEUTRAL_GGUF: Final = _words(_LISTS["neutral_gguf"])
"""Keys below the architecture's name. The original context length affects YaRN scaling only, whose reader reads it, and
sections of the rotary embedding affect images only."""

NEUTRAL_HF: Final = frozenset[str]().union(*map(_words, _LISTS["neutral"].values()))
"""Keys of `config.json`. The sampling parameters come from the request and the server's defaults."""

NEUTRAL_QUANTIZATION: Final = _words(_LISTS["neutral_quantization"])
"""Keys below `quantization_config`: how it was made, and how activations, K and V are quantized, which are not here.
The tensors show the type of scales, and whether the LM head is quantized."""

_CHANGING, _HARMLESS, _UNIT = (_words(_LISTS[f"{kind}_words"]) for kind in ("changing", "harmless", "unit"))
_CHANGING_QUANTIZATION: Final = _words(_LISTS["changing_quantization_words"])
_ON_BY_DEFAULT: Final = _words(_LISTS["on_by_default"])


def is_harmless(key: str, value: Any) -> bool:
    """Whether a field that no reader reads cannot change results, by the words of its name and its value."""
    if key in _ON_BY_DEFAULT or value in _LISTS["neutral_values"].get(key, ()):
        return value is not False
    words = _words_of(key)
    is_unit = value == 1 and value is not True and words & _UNIT and "attention" not in words
    return not value or bool(is_unit) or not words & _CHANGING or bool(words & _HARMLESS)


def is_neutral_quantization(key: str, value: Any) -> bool:
    """Whether a field below `quantization_config` that no reader reads cannot change the weights."""
    is_known = not value or key in NEUTRAL_QUANTIZATION
    return is_known or (is_harmless(key, value) and not _words_of(key) & _CHANGING_QUANTIZATION)


def _words_of(key: str) -> frozenset[str]:
    return frozenset(re.split(r"[._]", key.lower()))
