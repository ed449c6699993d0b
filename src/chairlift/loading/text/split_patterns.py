"""The rules of pre-tokenizers: regular expressions that split a text into words before BPE merges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rules by which a text is split before BPE merges.

    The original tokenizers of the models have these expressions, in the syntax of Oniguruma, the engine of
    `tokenizers`.

    Attributes:
        patterns: the expressions, each applied to the pieces of the previous one; each match is a piece, and so is the
            text between two matches.
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
_QWEN35: Final = (
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REST_WITH_SLASHES: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_TEKKEN: Final = "|".join((*_CASED_WORDS, r"\p{N}")) + _REST_WITH_SLASHES
_O200K: Final = (
    "|".join((*(f"{words}{_CONTRACTIONS[:-1]}?" for words in _CASED_WORDS), r"\p{N}{1,3}")) + _REST_WITH_SLASHES
)
# The third expression contains the letters of ASCII, as in the published files.
_DEEPSEEK: Final = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
    r"\p{N}",
)
_SEED_CODER: Final = r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_CHINESE_AND_KANA: Final = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"
_DEEPSEEK3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_RULES: Final = (
    (("default",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (("gpt-2", "phi-2", "olmo", "exaone4", "mellum"), PreTokenizer((_GPT2,))),
    (("smollm", "starcoder", "refact", "codeshell", "exaone"), PreTokenizer((r"\p{N}", _GPT2))),
    (
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    (("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    (("command-r",), PreTokenizer((r"\p{N}", _GPT2), nfc=True)),
    (("seed-coder",), PreTokenizer((_CONTRACTIONS + _WORDS + _SEED_CODER,))),
    (("deepseek-llm",), PreTokenizer(_DEEPSEEK)),
    (("deepseek-v3", "hunyuan-dense"), PreTokenizer((r"\p{N}{1,3}", _CHINESE_AND_KANA, _DEEPSEEK3))),
    (("qwen2",), PreTokenizer((_QWEN2,), nfc=True)),
    (("qwen35",), PreTokenizer((_QWEN35,), nfc=True)),
    (("deepseek-r1-qwen", "megrez", "stablelm2"), PreTokenizer((_QWEN2,))),
    (("tekken",), PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (("gpt-4o",), PreTokenizer((_O200K,), ignore_merges=True)),
)
PRE_TOKENIZERS: Final = {name: rules for names, rules in _RULES for name in names}
"""`tokenizer.ggml.pre` -> the rules of the byte-level BPE vocabulary."""
