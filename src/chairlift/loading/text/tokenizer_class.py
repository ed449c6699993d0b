"""The tokenizer classes of transformers 5 that replace parts of `tokenizer.json` by rules of their own.

`AutoTokenizer` chooses a class by the names in `tokenizer_config.json` and `config.json`. Most classes use
`tokenizer.json` as it is. The classes here take vocabulary, merges and added tokens from it, and some of them the
post-processor; the rules are those of `models/*/tokenization_*.py` in transformers.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

SPACE: Final = "▁"
GENERIC: Final = "TokenizersBackend"
"""The class that uses `tokenizer.json` as it is."""

_CLASSES_OF_TYPES: Final = {
    "BertTokenizer": "bert",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text",
    "GPT2Tokenizer": "opt",
    "GPTNeoXTokenizer": "olmo olmoe",
    "Qwen2Tokenizer": "qwen2 qwen3 qwen3_moe",
    "RobertaTokenizer": "roberta",
    "XLMRobertaTokenizer": "xlm-roberta",
    GENERIC: "granite granitemoe granitemoehybrid ministral3 mistral mistral3 mixtral modernbert olmo2 olmo3 phi3",
}
CLASS_OF_TYPE: Final = {kind: name for name, kinds in _CLASSES_OF_TYPES.items() for kind in kinds.split()}
"""`model_type` -> the class that transformers registers for it (`models/auto/tokenization_auto.py`)."""

QWEN_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Settings = Mapping[str, Any]
"""The content of `tokenizer_config.json`, with the text of each special token."""


def tokenizer_class(settings: Settings, config: Mapping[str, Any], *, has_byte_level: bool) -> str:
    """Return the class that AutoTokenizer chooses.

    Args:
        settings, config: the content of `tokenizer_config.json` and `config.json`.
        has_byte_level: whether `tokenizer.json` has a step of the type ByteLevel.
    """
    kind = config.get("model_type")
    registered = CLASS_OF_TYPE.get(kind) if isinstance(kind, str) else None
    given = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = given.removesuffix("Fast") if isinstance(given, str) else None
    if name == "LlamaTokenizer" and has_byte_level and kind != "qwen2":
        return GENERIC
    if registered is not None and (name is None or registered == GENERIC or kind == "qwen2"):
        return registered
    return name or GENERIC


def apply_tokenizer_class(backend: tokenizers.Tokenizer, name: str, settings: Settings) -> None:
    """Replace the parts of a tokenizer that transformers' class of this name replaces.

    Nothing is replaced if the vocabulary lacks the special tokens of the class, or has no scores that it needs.
    """
    if name in _RULES:
        _RULES[name](backend, settings)
        backend.add_tokens([])  # The spellings of added tokens depend on the normalizer.


def steps(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, including those of nested sequences."""
    pending = [] if component is None else [json.loads(component.__getstate__())]
    while pending:
        step = pending.pop()
        for key in ("normalizers", "pretokenizers", "decoders"):
            pending += step.get(key, [])
        yield step


def _byte_level(backend: tokenizers.Tokenizer, settings: Settings, normalizer: Any = None) -> None:
    _set_bpe(backend)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    backend.decoder = decoders.ByteLevel()


def _set_bpe(backend: tokenizers.Tokenizer, *, unknown: str | None = None, has_bytes: bool = False) -> None:
    if not isinstance(backend.model, models.BPE):
        backend.model = models.BPE(backend.get_vocab(with_added_tokens=False), [])
    model: Any = backend.model
    model.unk_token = None if unknown is None or backend.token_to_id(unknown) is None else unknown
    model.fuse_unk = model.byte_fallback = has_bytes
    model.ignore_merges = False


def _neox(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    _byte_level(backend, settings, normalizers.NFC())
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])


def _qwen2(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    _byte_level(backend, settings, normalizers.NFC())
    has_space = bool(settings.get("add_prefix_space"))
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=has_space, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"), pieces])


def _roberta(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    _byte_level(backend, settings)
    sep, cls = _text(settings, "sep", "</s>"), _text(settings, "cls", "<s>")
    sep_id, cls_id = backend.token_to_id(sep), backend.token_to_id(cls)
    if sep_id is not None and cls_id is not None:
        backend.post_processor = processors.RobertaProcessing((sep, sep_id), (cls, cls_id))


def _llama(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    has_space = settings.get("add_prefix_space") is not False
    scheme = "never" if not has_space else "always" if settings.get("legacy") else "first"
    _set_metaspace(backend, scheme, unknown=None)


def _code_llama(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    has_space = settings.get("add_prefix_space", True)
    _set_metaspace(backend, "first" if has_space else "never", unknown=_text(settings, "unk", "<unk>"))
    bos = _text(settings, "bos", "<s>")
    _set_template(backend, ([bos, "$A"], [bos, "$A", f"{bos}:1", "$B:1"]), bos)


def _set_metaspace(backend: tokenizers.Tokenizer, scheme: str, *, unknown: str | None) -> None:
    _set_bpe(backend, unknown=unknown, has_bytes=True)
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if scheme != "never" else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def _gemma(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    _set_bpe(backend, unknown=_text(settings, "unk", "<unk>"), has_bytes=True)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])


def _bert(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    texts = (("unk", "[UNK]"), ("cls", "[CLS]"), ("sep", "[SEP]"))
    unknown, cls, sep = tokens = [_text(settings, role, default) for role, default in texts]
    if any(backend.token_to_id(token) is None for token in tokens):
        return
    if not isinstance(backend.model, models.WordPiece):
        backend.model = models.WordPiece(backend.get_vocab(with_added_tokens=False))
    model: Any = backend.model
    model.unk_token, model.continuing_subword_prefix, model.max_input_chars_per_word = unknown, "##", 100
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece("##")
    template = [cls, "$A", sep], [cls, "$A", sep, "$B:1", f"{sep}:1"]
    _set_template(backend, template, cls, sep)


def _xlm_roberta(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    if not isinstance(backend.model, models.Unigram):
        return
    state = json.loads(backend.model.__getstate__())
    if state["unk_id"] != 3 or state.get("byte_fallback"):
        backend.model = models.Unigram([(token, score) for token, score in state["vocab"]], 3, False)
    maps = [step["precompiled_charsmap"] for step in steps(backend.normalizer) if step["type"] == "Precompiled"]
    backend.normalizer = normalizers.Precompiled(b64decode(maps[0])) if maps else None
    scheme = "always" if settings.get("add_prefix_space", True) else "never"
    words = pre_tokenizers.Metaspace(SPACE, scheme)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    backend.decoder = decoders.Metaspace(SPACE, scheme)
    bos, eos = _text(settings, "bos", "<s>"), _text(settings, "eos", "</s>")
    _set_template(backend, ([bos, "$A", eos], [bos, "$A", eos, eos, "$B", eos]), bos, eos)


def _text(settings: Settings, role: str, default: str) -> str:
    return str(settings.get(f"{role}_token", default))


def _set_template(backend: tokenizers.Tokenizer, template: tuple[list[str], list[str]], *tokens: str) -> None:
    """Set the templates for one text and for two, unless one of their tokens is not in the vocabulary."""
    special = [(token, backend.token_to_id(token)) for token in tokens]
    if all(token_id is not None for _, token_id in special):
        single, pair = template
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


_RULES: Final[dict[str, Callable[[tokenizers.Tokenizer, Settings], None]]] = {
    "BartTokenizer": _roberta,
    "BertTokenizer": _bert,
    "CodeLlamaTokenizer": _code_llama,
    "DistilBertTokenizer": _bert,
    "GPT2Tokenizer": _byte_level,
    "GPTNeoXTokenizer": _neox,
    "GemmaTokenizer": _gemma,
    "LlamaTokenizer": _llama,
    "Qwen2Tokenizer": _qwen2,
    "RobertaTokenizer": _roberta,
    "XLMRobertaTokenizer": _xlm_roberta,
}
