"""The tokenizer of a GGUF file, rebuilt with the `tokenizers` library.

`tokenizer.ggml.model` "gpt2" is byte-level BPE after the pre-tokenizer `tokenizer.ggml.pre`; "llama" is SentencePiece
BPE, whose merges are derived from the scores, and "gemma4" is the same with the merges in the file.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from chairlift.loading.cache import models_dir, write_atomically
from chairlift.loading.gguf_file import GGUFFile
from chairlift.loading.text.chat_template import named_templates
from chairlift.loading.text.end_tokens import END_TEXTS
from chairlift.loading.text.split_patterns import PRE_TOKENIZERS, PreTokenizer
from chairlift.loading.text.tokenizer import Tokenizer, set_bos_and_eos
from chairlift.loading.text.tokenizer_class import SPACE
from chairlift.models.reading.config_fields import ConfigFields

BUILD: Final = 2  # Increase it when the same file gives a different tokenizer, so that cached ones are not used.
PREFIX: Final = "tokenizer.ggml."
TEMPLATE: Final = "tokenizer.chat_template"
BYTE_TOKENS: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))
MAX_SPLIT_CHARACTERS: Final = 10**9  # Work to derive the merges; a real vocabulary has about 10^8.
ROLES: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Values of `tokenizer.ggml.token_type`. Tokens of other types are ordinary entries of the vocabulary, too."""
PADDING: Final = re.compile(r"\[PAD\d+\]|\[EMPTY_\d+\]")
LOOKS_SPECIAL: Final = re.compile(r"<\|(?!reserved).*\|>|<｜(?!place).*｜>|<pad>|<mask>|<2mass>|\[@BOS@\]")
"""Spellings that llama.cpp's converter (`does_token_look_special`) makes control tokens in any case."""
MAX_NAMED: Final = 12


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Return the tokenizer of a GGUF file, from the cache if it was built before.

    Raises:
        ModelLoadError: the metadata is incomplete or not supported; the message names the key.
    """
    vocabulary = GGUFVocabulary(file)
    backend = _cached(file, len(vocabulary.tokens)) or _build_and_cache(file, vocabulary)
    roles = {role: vocabulary.token_at(key) for role, key in ROLES.items()}
    _log_conversion(vocabulary)
    named = {
        key.removeprefix(TEMPLATE).removeprefix("."): value for key, value in file.metadata.items() if TEMPLATE in key
    }
    return Tokenizer(
        backend,
        special_tokens={role: token for role, token in roles.items() if token is not None},
        chat_template=named_templates({name or "default": text for name, text in named.items()}),
    )


def _log_conversion(vocabulary: GGUFVocabulary) -> None:
    """Log the tokens that the converter added or may have changed: padding, and text that became control tokens."""
    types = list(zip(vocabulary.tokens, vocabulary.types(), strict=True))
    known = {vocabulary.token_at(key) for key in ROLES.values()}.union(END_TEXTS)
    control = [token for token, kind in types if kind == CONTROL and LOOKS_SPECIAL.fullmatch(token)]
    found = {
        "pad the vocabulary, and have no meaning": [
            token for token, kind in types if kind == UNUSED or PADDING.fullmatch(token)
        ],
        "are control tokens, which answers omit (skip_special_tokens=false shows them): the converter makes added "
        "tokens of such a spelling control tokens, even if they are text in the model's folder": [
            token for token in control if token not in known
        ],
    }
    for meaning, tokens in found.items():
        if tokens:
            more = f" and {len(tokens) - MAX_NAMED:,} more" if len(tokens) > MAX_NAMED else ""
            logger.info(f"{vocabulary.source}: {', '.join(map(repr, tokens[:MAX_NAMED]))}{more} {meaning}")


class GGUFVocabulary(ConfigFields):
    """The tokenizer's metadata, which is checked as it is read."""

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file.metadata, str(file.path), PREFIX)
        # Empty strings are padding. Each gets a distinct name.
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self.strings("tokens"))]

    def strings(self, key: str) -> list[str]:
        return self._list(key, str)

    def numbers(self, key: str) -> list[float]:
        return self._list(key, (int, float), len(self.tokens))

    def types(self) -> list[int]:
        absent = self.get("token_type") is None
        return [NORMAL] * len(self.tokens) if absent else self._list("token_type", int, len(self.tokens))

    def token_at(self, key: str) -> str | None:
        """Return the token whose id is the value of `key`, or None if it is absent or outside the vocabulary."""
        token_id = self.get(key)
        return self.tokens[token_id] if isinstance(token_id, int) and 0 <= token_id < len(self.tokens) else None

    def ids(self) -> dict[str, int]:
        ids = {token: i for i, token in enumerate(self.tokens)}
        if len(ids) != len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if ids[token] != i)
            raise self.error("tokens", f"contains {twice!r} twice")
        return ids

    def _list(self, key: str, kind: type | tuple[type, ...], length: int | None = None) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list) or not value or not isinstance(value[0], kind):
            raise self.error(key, "is missing or has a wrong type, so the file contains no tokenizer")
        if length is not None and len(value) != length:
            raise self.error(key, f"has {len(value)} entries, but there are {length} tokens")
        return value


def build_tokenizer(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """Build the tokenizer of a vocabulary without the cache; see gguf_tokenizer."""
    model = vocabulary.choice("model", ("gemma4", "gpt2", "llama"))
    if model == "llama":
        backend, add_bos = _sentencepiece(vocabulary, _scored_merges(vocabulary), add_space=True), True
    else:
        name = vocabulary.choice("pre", PRE_TOKENIZERS, "default") if model == "gpt2" else model
        backend, add_bos = _listed_bpe(vocabulary, PRE_TOKENIZERS[name]), PRE_TOKENIZERS[name].add_bos
    _add_tokens(backend, vocabulary)
    set_bos_and_eos(
        backend,
        bos=vocabulary.token_at("bos_token_id") if vocabulary.flag("add_bos_token", add_bos) else None,
        eos=vocabulary.token_at("eos_token_id") if vocabulary.flag("add_eos_token", False) else None,
    )
    return backend


def _listed_bpe(vocabulary: GGUFVocabulary, pre: PreTokenizer) -> tokenizers.Tokenizer:
    """Build a BPE tokenizer whose merges are in the file, usually a byte-level one (Radford et al., 2019)."""
    merges = [_pair(vocabulary, merge) for merge in vocabulary.strings("merges")]
    if pre.marks_spaces:
        return _sentencepiece(vocabulary, merges, add_space=False)
    backend = tokenizers.Tokenizer(_bpe(vocabulary, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _scored_merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    if sum(len(token) ** 2 for token in vocabulary.tokens) > MAX_SPLIT_CHARACTERS:
        raise vocabulary.error("tokens", "contains tokens too long to derive their merges; the file is damaged")
    return derive_merges(vocabulary.tokens, vocabulary.numbers("scores"))


def _sentencepiece(
    vocabulary: GGUFVocabulary, merges: list[tuple[str, str]], *, add_space: bool
) -> tokenizers.Tokenizer:
    """Build a SentencePiece BPE tokenizer (Kudo and Richardson, 2018) with byte fallback.

    Args:
        add_space: whether a space precedes the text if the file does not specify it.
    """
    unknown = vocabulary.token_at("unknown_token_id") or "<unk>"
    if unknown not in vocabulary.tokens and not BYTE_TOKENS.issubset(vocabulary.tokens):
        raise vocabulary.error("tokens", f"lacks {unknown!r} and some of the tokens of bytes; the file is damaged")
    backend = tokenizers.Tokenizer(_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    add_space = vocabulary.flag("add_space_prefix", add_space)
    replace: list[Any] = [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *replace] if add_space else replace)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space else steps)
    return backend


def _bpe(vocabulary: GGUFVocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids(), merges=merges, **options)
    except Exception as error:  # The library raises no narrower type.
        raise vocabulary.error("merges", f"does not match the tokens: {error}") from error


def _pair(vocabulary: GGUFVocabulary, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise vocabulary.error("merges", f"must contain pairs of tokens separated by a space, got {merge!r}")
    return left, right


def derive_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the BPE merges of a SentencePiece vocabulary: every way to split a token into two tokens, best first.

    Merges are ordered by descending score, then by longer left parts, longer right parts and earlier tokens.
    """
    known = set(tokens)
    ranked = [
        (-score, -cut, cut - len(token), index)  # -len(left), -len(right)
        for index, (token, score) in enumerate(zip(tokens, scores, strict=True))
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    ranked.sort()
    return [(tokens[index][:-minus_cut], tokens[index][-minus_cut:]) for _, minus_cut, _, index in ranked]


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Add the tokens that are matched in the text before the pre-tokenizer; an end token is one, whatever its type."""
    types, ends = list(zip(vocabulary.tokens, vocabulary.types(), strict=True)), frozenset(END_TEXTS)
    special = [token for token, kind in types if kind in (CONTROL, UNKNOWN) or token in ends]
    user_defined = [token for token, kind in types if kind == USER_DEFINED and token not in ends]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])


def _cache_paths(file: GGUFFile) -> list[Path]:
    """Return the possible paths of the cached tokenizer: beside the model, or in the cache if that is read-only."""
    key = f"{BUILD}:{tokenizers.__version__}:{file.metadata_digest()}"
    name = f"{file.path.name}.{hashlib.sha256(key.encode()).hexdigest()[:12]}.tokenizer.json"
    return [folder / name for folder in dict.fromkeys((file.path.resolve().parent, models_dir()))]


def _cached(file: GGUFFile, num_tokens: int) -> tokenizers.Tokenizer | None:
    for cached in _cache_paths(file):
        if not cached.is_file():
            continue
        try:
            backend = tokenizers.Tokenizer.from_file(str(cached))
        except Exception as error:  # The library raises no narrower type.
            logger.warning("%s cannot be read (%s); the tokenizer is built again", cached, error)
            continue
        if backend.get_vocab_size(with_added_tokens=True) == num_tokens:
            return backend
    return None


def _build_and_cache(file: GGUFFile, vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    backend = build_tokenizer(vocabulary)
    for cached in _cache_paths(file):
        try:
            write_atomically(cached, backend.to_str())
        except OSError as error:
            logger.debug("the tokenizer is not cached in %s: %s", cached.parent, error)
        else:
            break
    return backend
