"""The rules of pre-tokenizers: regular expressions that split a text into words before BPE merges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rules by which a text is split before BPE merges.

    The expressions have the syntax of Oniguruma, the engine of `tokenizers`. They are those of the models'
    `tokenizer.json`, or those of `src/llama-vocab.cpp` and `src/unicode.cpp` in llama.cpp where `_RULES` says so.

    Attributes:
        patterns: the expressions, each applied to the pieces of the previous one; each match is a piece, and so is the
            text between two matches.
        ignore_merges: whether a piece that is a token is kept whole without applying merges.
        add_bos: whether a BOS token precedes the text if the file does not specify it.
        nfc: whether the text is normalized to NFC first, as by the model's original tokenizer.
        marks_spaces: whether tokens are text with ▁ for a space and <0xNN> for a lone byte, instead of GPT-2's
            characters for bytes.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    marks_spaces: bool = False


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
_DEEPSEEK_CODER: Final = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]&&[^\s]]+",
    r"\p{N}",
)
_SEED_CODER: Final = r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_CHINESE_AND_KANA: Final = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"
_MARKED_WORDS: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3: Final = _MARKED_WORDS + r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHER: Final = r"[^\s\p{L}\p{M}\p{N}\p{P}\p{S}]"
_LINES: Final = r"[^\n]+|\n+"
_FROM_THE_RIGHT: Final = (
    r"\A\P{N}*+\p{N}{1,2}(?=(?:\p{N}{3})++\z)|\A\P{N}*+\p{N}{3}(?=(?:\p{N}{3})*+\z)|\G(?!\A)\p{N}{3}"
)
r"""Groups of three digits from the right, of a piece that ends with digits: the first match makes the others possible
(`\G`), so that the length is compared once."""
_WORDS_OF_ANY_CASE: Final = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_CONTRACTIONS[:-1]}?|"
_GRANITE_MULTILINGUAL: Final = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?[[\p{{L}}\p{{M}}]&&[^a-z]]{upper}[[\p{{L}}\p{{M}}]&&[^A-Z]]{lower}{_CONTRACTIONS[:-1]}?"
    for upper, lower in (("*", "+"), ("+", "*"))
)
_HAN: Final = (
    r"\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{20000}-\x{2a6df}\x{2a700}-\x{2ebef}\x{f900}-\x{faff}\x{2f800}-\x{2fa1f}"
)
_KIMI: Final = rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_CONTRACTIONS[:-1]}?|\p{{N}}{{1,3}}" + _REST
# The last white space of the run before decides whether one of it can be followed by a line break.
_JAIS2: Final = (
    _CONTRACTIONS
    + _WORDS
    + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|(?<![^\S\r\n])\s*[\r\n]+|"
    + "|".join(rf"\s{{{length}}}(?!\S)" for length in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
    + r"|\s"
)
_BLOOM: Final = r" ?[^\s(|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"
_JOINED_WORDS: Final = (
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_YOUTU_SCRIPTS: Final = (
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+"
    r"|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+"
    r"|[\x{3105}-\x{312f}]+|[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"
)
_ASIAN_SCRIPTS: Final = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}"
    r"\x{e40}-\x{e7f}\x{e80}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}"
    r"\x{ac00}-\x{d7af}\x{1100}-\x{11ff}]+"
)
_CHAMELEON: Final = (
    r"<sentinel:[0-9]+>",
    r"IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)

JOINING: Final = frozenset((_JOINED_WORDS,))
"""Expressions of which a match may contain a letter and a space after it."""

_RULES: Final = (
    (("default",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (("falcon",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    (
        (
            *("gpt-2", "phi-2", "olmo", "exaone4", "mellum", "mpt", "jais", "trillion", "granite-docling", "gigachat"),
            *("a.x-4.0", "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en"),
            *("jina-v2-code", "roberta-bpe"),
        ),
        PreTokenizer((_GPT2,)),
    ),
    (
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "jina-v5-nano"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    (("dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    (("minicpm5",), PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True)),
    (("jais-2",), PreTokenizer((_JAIS2,))),
    (("k2-horizon",), PreTokenizer((_LLAMA3.replace(r"\p{L}+|", r"[\p{L}\p{M}\x{200c}\x{200d}]+|"),))),
    (("command-r",), PreTokenizer((r"\p{N}", _GPT2), nfc=True)),
    (("seed-coder",), PreTokenizer((_CONTRACTIONS + _WORDS + _SEED_CODER,))),
    (("deepseek-llm",), PreTokenizer(_DEEPSEEK)),
    (("deepseek-coder",), PreTokenizer(_DEEPSEEK_CODER)),
    (
        ("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"),
        PreTokenizer((r"\p{N}{1,3}", _CHINESE_AND_KANA, _DEEPSEEK3)),
    ),
    (
        ("spark2_5",),
        PreTokenizer((r"\p{N}{1,3}", _CHINESE_AND_KANA, _MARKED_WORDS + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    ),
    (
        ("afmoe",),
        PreTokenizer((_ASIAN_SCRIPTS, rf"(?<!{_OTHER}){_OTHER}*+\p{{N}}+|" + _DEEPSEEK3, _FROM_THE_RIGHT)),
    ),
    (("qwen2",), PreTokenizer((_QWEN2,), nfc=True)),
    (("qwen35",), PreTokenizer((_QWEN35,), nfc=True)),
    (
        ("deepseek-r1-qwen", "megrez", "stablelm2", "kormo", "f2llmv2", "hunyuan", "solar-open", "grok-2"),
        PreTokenizer((_QWEN2,)),
    ),
    (("laguna",), PreTokenizer((_LINES, _QWEN2))),
    (("ufakzeka",), PreTokenizer((_QWEN2.removeprefix(_CONTRACTIONS),))),
    (("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((_QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),))),
    (("exaone-moe",), PreTokenizer((_JOINED_WORDS,))),
    (("tekken",), PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (("gpt-4o",), PreTokenizer((_O200K,), ignore_merges=True)),
    (("llama4", "kanana2", "talkie", "minimax-m2"), PreTokenizer((_O200K,))),
    (("kimi-k2",), PreTokenizer((_KIMI,))),
    (
        ("granite-embed-multi-97m",),
        PreTokenizer((_GRANITE_MULTILINGUAL + r"|\p{N}{1,3}" + _REST_WITH_SLASHES,), ignore_merges=True),
    ),
    (
        ("tiny_aya", "cohere2moe"),
        PreTokenizer((_WORDS_OF_ANY_CASE + r"\p{N}+" + _REST_WITH_SLASHES, _FROM_THE_RIGHT)),
    ),
    (
        ("youtu",),
        PreTokenizer((_YOUTU_SCRIPTS, _WORDS_OF_ANY_CASE + r"\p{N}" + _REST_WITH_SLASHES), ignore_merges=True),
    ),
    (("superbpe",), PreTokenizer((r"\p{N}+", r"[0-9]{3,}", _FROM_THE_RIGHT))),
    (("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    (("viking",), PreTokenizer((_BLOOM, r"\p{N}"))),
    (("chameleon",), PreTokenizer(_CHAMELEON, add_bos=True)),
    (("gemma4", "granite-embed-multi-311m"), PreTokenizer((), add_bos=True, marks_spaces=True)),
    (("sarvam-moe",), PreTokenizer((), marks_spaces=True)),
)
PRE_TOKENIZERS: Final = {name: rules for names, rules in _RULES for name in names}
