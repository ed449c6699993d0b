"""The pre-tokenizers of byte-level BPE vocabularies, by their name in `tokenizer.ggml.pre`.

The expressions are those of the models' original tokenizers, in the syntax of Oniguruma, the engine of `tokenizers`.
Several expressions are applied one after the other, each to the pieces of the previous one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rules by which a text is split before BPE merges.

    Attributes:
        patterns: the expressions; each match is a piece, and so is the text between two matches.
        ignore_merges: whether a piece that is a token is kept whole without applying merges.
        add_bos: whether a BOS token precedes the text if the file does not specify it.
        nfc: whether the text is normalized to NFC first, as by the model's original tokenizer.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2: Final = _CONTRACTIONS + _WORDS + r"\p{N}" + _REST
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

GPT2: Final = PreTokenizer((_GPT2,))
DIGITS_THEN_GPT2: Final = PreTokenizer((r"\p{N}", _GPT2))
LLAMA3: Final = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
LLAMA3_WITH_MERGES: Final = PreTokenizer((_LLAMA3,))
QWEN2: Final = PreTokenizer((_QWEN2,), nfc=True)
QWEN2_WITHOUT_NFC: Final = PreTokenizer((_QWEN2,))
TEKKEN: Final = PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)
DEFAULT: Final = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: Final[dict[str, PreTokenizer]] = {
    "default": DEFAULT,
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "olmo": GPT2,
    "smollm": DIGITS_THEN_GPT2,
    "starcoder": DIGITS_THEN_GPT2,
    "refact": DIGITS_THEN_GPT2,
    "codeshell": DIGITS_THEN_GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "pixtral": LLAMA3,
    "dbrx": LLAMA3_WITH_MERGES,
    "smaug-bpe": LLAMA3_WITH_MERGES,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2_WITHOUT_NFC,
    "megrez": QWEN2_WITHOUT_NFC,
    "stablelm2": QWEN2_WITHOUT_NFC,
    "tekken": TEKKEN,
}
