"""The tokenizer that a GGUF file describes, rebuilt with the `tokenizers` library.

`tokenizer.ggml.model` "gpt2" is byte-level BPE, split first as `tokenizer.ggml.pre` says; "llama" is SentencePiece BPE,
whose merges are derived from the scores.
"""

from __future__ import annotations

import enum
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from chairlift.errors import ModelLoadError
from chairlift.loading.cache import models_dir, write_atomically
from chairlift.loading.gguf_file import GGUFFile
from chairlift.loading.text.chat_template import select_template
from chairlift.loading.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from chairlift.loading.text.tokenizer import Tokenizer, set_bos_and_eos

BUILD: Final = 1  # counts up when the same file would give another tokenizer
PREFIX: Final = "tokenizer.ggml."
SPACE: Final = "▁"
MAX_CUT_CHARACTERS: Final = 10**9  # of all ways to cut all tokens in two; a real vocabulary has some 10^8
ROLES: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
logger = logging.getLogger(__name__)


class TokenType(enum.IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file, from the cache if it was built before.

    Raises:
        ModelLoadError: the metadata are incomplete or of a kind that is not supported; names the key.
    """
    vocabulary = _Vocabulary(file)
    backend = _cached(file.path, len(vocabulary.tokens)) or _build_and_cache(vocabulary)
    roles = {role: vocabulary.token_at(key) for role, key in ROLES.items()}
    return Tokenizer(
        backend,
        special_tokens={role: token for role, token in roles.items() if token is not None},
        chat_template=select_template(file.metadata.get("tokenizer.chat_template")),
    )


class _Vocabulary:
    """The tokenizer's metadata, checked as they are read."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._metadata = file.metadata
        # Empty strings are padding; each needs a name of its own.
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self.strings("tokens"))]

    def error(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {PREFIX}{key} {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(PREFIX + key, default)

    def strings(self, key: str) -> list[str]:
        return self._list(key, str)

    def numbers(self, key: str) -> list[float]:
        return self._list(key, (int, float), len(self.tokens))

    def types(self) -> list[int]:
        absent = self.get("token_type") is None
        return [TokenType.NORMAL] * len(self.tokens) if absent else self._list("token_type", int, len(self.tokens))

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def token_at(self, key: str) -> str | None:
        """The token whose id is at `key`; None if absent or outside of the vocabulary."""
        token_id = self.get(key)
        return self.tokens[token_id] if isinstance(token_id, int) and 0 <= token_id < len(self.tokens) else None

    def ids(self) -> dict[str, int]:
        ids = {token: i for i, token in enumerate(self.tokens)}
        if len(ids) != len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if ids[token] != i)
            raise self.error("tokens", f"holds {twice!r} twice")
        return ids

    def _list(self, key: str, kind: type | tuple[type, ...], length: int | None = None) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list) or not value or not isinstance(value[0], kind):
            raise self.error(key, "is missing or of the wrong type, so there is no tokenizer in this file")
        if length is not None and len(value) != length:
            raise self.error(key, f"has {len(value)} entries for {length} tokens")
        return value


def build(file: GGUFFile) -> tokenizers.Tokenizer:
    """Build the tokenizer anew; see gguf_tokenizer."""
    return _build(_Vocabulary(file))


def _build(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    model = vocabulary.get("model")
    if model == "gpt2":
        pre = _pre_tokenizer(vocabulary)
        backend, add_bos = _byte_level(vocabulary, pre), pre.add_bos
    elif model == "llama":
        backend, add_bos = _sentencepiece(vocabulary), True
    else:
        raise vocabulary.error("model", f"is {model!r}, which is not supported; supported: gpt2, llama")
    _add_tokens(backend, vocabulary)
    set_bos_and_eos(
        backend,
        bos=vocabulary.token_at("bos_token_id") if vocabulary.flag("add_bos_token", add_bos) else None,
        eos=vocabulary.token_at("eos_token_id") if vocabulary.flag("add_eos_token", False) else None,
    )
    return backend


def _pre_tokenizer(vocabulary: _Vocabulary) -> PreTokenizer:
    name = vocabulary.get("pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise vocabulary.error("pre", f"is {name!r}, which is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _byte_level(vocabulary: _Vocabulary, pre: PreTokenizer) -> tokenizers.Tokenizer:
    """Byte-level BPE (Radford et al., 2019)."""
    merges = [_pair(vocabulary, merge) for merge in vocabulary.strings("merges")]
    model = _bpe(vocabulary, merges, ignore_merges=pre.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece BPE (Kudo and Richardson, 2018) with byte fallback."""
    if sum(len(token) ** 2 for token in vocabulary.tokens) > MAX_CUT_CHARACTERS:
        raise vocabulary.error("tokens", "holds tokens too long to derive their merges: there is no such vocabulary")
    merges = derive_merges(vocabulary.tokens, vocabulary.numbers("scores"))
    unknown = vocabulary.token_at("unknown_token_id") or "<unk>"
    backend = tokenizers.Tokenizer(_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    add_space = vocabulary.flag("add_space_prefix", True)
    replace: list[Any] = [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *replace] if add_space else replace)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space else steps)
    return backend


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids(), merges=merges, **options)
    except Exception as error:  # the library raises nothing more precise
        raise vocabulary.error("merges", f"does not fit the tokens: {error}") from error


def _pair(vocabulary: _Vocabulary, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise vocabulary.error("merges", f"must hold pairs, two tokens and a space between, got {merge!r}")
    return left, right


def derive_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """BPE merges, best first, of a SentencePiece vocabulary: every way to cut a token into two tokens.

    A higher score merges first; among equals, longer left parts, then longer right parts, then earlier tokens.
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


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tokens that are matched whole in the text, before anything else."""
    types = list(zip(vocabulary.tokens, vocabulary.types(), strict=True))
    special = [token for token, kind in types if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    user_defined = [token for token, kind in types if kind == TokenType.USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])


def _cache_paths(path: Path) -> list[Path]:
    """Beside the model, or in the cache if that folder is read-only."""
    stat = path.stat()
    key = f"{BUILD}:{tokenizers.__version__}:{stat.st_size}:{stat.st_mtime_ns}"
    name = f"{path.name}.{hashlib.sha256(key.encode()).hexdigest()[:12]}.tokenizer.json"
    return [folder / name for folder in dict.fromkeys((path.resolve().parent, models_dir()))]


def _cached(path: Path, num_tokens: int) -> tokenizers.Tokenizer | None:
    for cached in _cache_paths(path):
        if not cached.is_file():
            continue
        try:
            backend = tokenizers.Tokenizer.from_file(str(cached))
        except Exception as error:  # the library raises nothing more precise
            logger.warning("%s cannot be read (%s) and is built again", cached, error)
            continue
        if backend.get_vocab_size(with_added_tokens=True) == num_tokens:
            return backend
    return None


def _build_and_cache(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    backend = _build(vocabulary)
    for cached in _cache_paths(vocabulary.path):
        try:
            write_atomically(cached, backend.to_str())
        except OSError as error:
            logger.debug("the tokenizer is not cached in %s: %s", cached.parent, error)
        else:
            break
    return backend
