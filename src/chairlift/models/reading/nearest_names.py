"""Messages with the reason why an architecture is not supported, and the nearest supported ones."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches
from os.path import commonprefix
from typing import Final, NamedTuple

SUFFIX: Final = re.compile(
    r"(For(CausalLM|ConditionalGeneration|MaskedLM|SequenceClassification|BlockDiffusion)|LMHeadModel|Model)$"
)
FIRST_WORD: Final = re.compile(r"(?i:gpt).*|[A-Z]*[a-z]+|[A-Z]+")
"""The first word of a name; all of it after GPT, because models of many families have names with it."""
NUM_NEAREST: Final = 3
SIMILARITY: Final = 0.7


class MissingFeature(NamedTuple):
    """What unsupported architectures have that is not computed.

    Attributes:
        pattern: an expression of their names in lower case, without an ending such as ForCausalLM.
        reason: the second half of the sentence "It is not supported, because ...".
        models: examples, for the documentation.
    """

    pattern: str
    reason: str
    models: str


MISSING_FEATURES: Final = (
    MissingFeature(
        "diffusion|^llada|^dream|^sdar|mercury", "it decodes by diffusion: it writes tokens of a block in any order",
        "DiffusionGemma, LLaDA, Dream, SDAR",
    ),
    MissingFeature(
        "deepseek_?v?3-?2|dsa$|^hyv4|^qwen4exp|^glm5next|^axk2|^dots3note|^minimaxm3|^mistrallarge4",
        "its attention is sparse: an indexer chooses the keys of a query",
        "DeepSeek V3.2, GLM-5, MiniMax-M3, Hy4, Qwen4 (experimental), A.X K2",
    ),
    MissingFeature("deepseek_?v?4", "its keys and values are compressed by groups of tokens", "DeepSeek V4"),
    MissingFeature(
        "^(falcon_?)?mamba2?$|rwkv|^xlstm|retnet|plamo1",
        "it has no layer with attention, and at least 1 is required (use a hybrid model such as Granite 4 H)",
        "Mamba, Falcon Mamba, RWKV, xLSTM",
    ),
    MissingFeature(
        "amba|recurrent|plamo2|^minimax$|^minimax(text|m1)|bailinghybrid|^zaya",
        "its recurrent layers are of a kind that is not supported",
        "Jamba, Zamba 2, Bamba, RecurrentGemma, MiniMax-Text-01 and M1, Ring-Linear",
    ),
    MissingFeature(
        "t5|bart|marian|pegasus|prophetnet|encoderdecoder",
        "it has an encoder besides its decoder", "T5, BART, Marian, Pegasus",
    ),
    MissingFeature(
        "vl|vision|visual|image|llava|pixtral|idefics|paligemma|mllama|clip|siglip|florence|janus|ocr",
        "it reads images, and its text model is not known", "Llama 3.2 Vision, Florence 2, Janus, GLM-OCR",
    ),
    MissingFeature(
        "audio|speech|whisper|omni|wav2vec|asr$|moshi",
        "it reads audio, and its text model is not known", "Whisper, Moshi, Qwen3-ASR",
    ),
)  # fmt: skip
"""The first entry that applies to a name counts."""


def describe_unsupported(name: str, supported: Collection[str]) -> str:
    """Return the part of a message that gives the reason, if one is known, and the nearest supported names.

    It suggests the name that was meant instead, if only its spelling differs.
    """
    if misspelt := next((other for other in supported if _letters(other) == _letters(name)), None):
        return f"is not supported, because its name is unknown; did you mean {misspelt}?"
    stem = _stem(name)
    missing = next((each for each in MISSING_FEATURES if re.search(each.pattern, stem)), None)
    reason = "" if missing is None else f", because {missing.reason}"
    names = ", ".join(nearest_names(name, supported))
    nearest = f"nearest supported architectures: {names}; " if names else ""
    return f"is not supported{reason}; {nearest}docs/models.md lists all {len(supported)} that are supported"


def nearest_names(name: str, supported: Collection[str]) -> list[str]:
    """Return at most three names: those that begin with the same word, as Qwen2 for Qwen2VL, and then similar ones."""
    stem = _stem(name)
    relatives = (other for other in sorted(supported, key=len) if _first_word(other) == _first_word(name))
    by_prefix = sorted(relatives, key=lambda other: -len(commonprefix((stem, _stem(other)))))  # noqa: RUF071
    stems = {_stem(other): other for other in supported}
    similar = (stems[found] for found in get_close_matches(stem, stems, NUM_NEAREST, SIMILARITY))
    return list(dict.fromkeys((*by_prefix, *similar)))[:NUM_NEAREST]


def _stem(name: str) -> str:
    return SUFFIX.sub("", name).lower()


def _first_word(name: str) -> str:
    found = FIRST_WORD.match(SUFFIX.sub("", name))
    return name if found is None else found[0].lower()


def _letters(name: str) -> list[str]:
    """The letters and digits of a name, which two spellings of it have in common."""
    return sorted(filter(str.isalnum, name.lower()))
