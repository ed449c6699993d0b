"""The tokenizer classes of transformers 5 that replace parts of `tokenizer.json` by other rules.

`AutoTokenizer` chooses a class by the names in `tokenizer_config.json` and `config.json`. Most classes use
`tokenizer.json` as it is. Those in `tokenizer_classes.json`, which has the rules of `models/*/tokenization_*.py` in
transformers, take vocabulary, merges and added tokens from it, and some of them the post-processor.

    types: model_type -> the class that transformers registers for it
    overruling: the types whose class precedes the one in `tokenizer_config.json`, which is wrong in published folders
    classes: name -> model, its options, normalizer, pre-tokenizer and decoder ("$name" is a setting or special token),
        required special tokens, and the templates for one text and for two
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any, Final

import tokenizers
from tokenizers import models, processors

SPACE: Final = "▁"
GENERIC: Final = "TokenizersBackend"
"""The class that uses `tokenizer.json` as it is."""

_DATA: Final = json.loads(files(__package__).joinpath("tokenizer_classes.json").read_text(encoding="utf-8"))
_PARTS: Final = ("normalizer", "pre_tokenizer", "decoder")


def tokenizer_class(settings: Mapping[str, Any], config: Mapping[str, Any], *, has_byte_level: bool) -> str:
    """Return the class that AutoTokenizer chooses.

    Args:
        settings, config: the content of `tokenizer_config.json` and `config.json`.
        has_byte_level: whether `tokenizer.json` has a step of the type ByteLevel.
    """
    kind = config.get("model_type")
    registered = _DATA["types"].get(kind) if isinstance(kind, str) else None
    given = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = given.removesuffix("Fast") if isinstance(given, str) else None
    is_overruling = kind in _DATA["overruling"]
    if name == "LlamaTokenizer" and has_byte_level and not is_overruling:
        return GENERIC
    if registered is not None and (name is None or registered == GENERIC or is_overruling):
        return str(registered)
    return name or GENERIC


def apply_tokenizer_class(backend: tokenizers.Tokenizer, name: str, settings: Mapping[str, Any]) -> None:
    """Replace the parts of a tokenizer that transformers' class of this name replaces.

    Nothing is replaced if the vocabulary lacks a special token of the class, or scores that it needs.
    """
    rules = _DATA["classes"].get(name, {})
    while (base := rules.get("as")) is not None:
        rules = {**_DATA["classes"][base], **{key: value for key, value in rules.items() if key != "as"}}
    tokens = {role: str(settings.get(f"{role}_token", text)) for role, text in rules.get("tokens", {}).items()}
    if not rules or any(backend.token_to_id(text) is None for text in tokens.values()):
        return
    kind = getattr(models, rules["model"])
    if not isinstance(backend.model, kind):
        if kind is models.Unigram:
            return
        vocab = backend.get_vocab(with_added_tokens=False)
        backend.model = kind(vocab, []) if kind is models.BPE else kind(vocab)
    filled = _fill(rules, tokens | _values(backend, rules, settings))
    for option, value in filled.get("options", {}).items():
        setattr(backend.model, option, value)
    state = {"model": {"type": "BPE", "vocab": {}, "merges": []}, **{part: filled[part] for part in _PARTS}}
    parts = tokenizers.Tokenizer.from_str(json.dumps(state))
    for part in _PARTS:
        setattr(backend, part, getattr(parts, part))
    if "single" in rules:
        single, pair = ([tokens.get(each, each) for each in rules[key].split()] for key in ("single", "pair"))
        special = [(text, backend.token_to_id(text)) for text in set(tokens.values())]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    backend.add_tokens([])  # The spellings of added tokens depend on the normalizer.


def _values(backend: tokenizers.Tokenizer, rules: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a class, and what follows from them."""
    values = {
        key: default if settings.get(key) is None else settings[key]
        for key, default in rules.get("settings", {}).items()
    }
    has_space = bool(values.get("add_prefix_space"))
    scheme = rules.get("scheme") or ("always" if values.get("legacy") else "first")
    precompiled = next((step for step in steps(backend.normalizer) if step["type"] == "Precompiled"), None)
    return {
        **values,
        "scheme": scheme if has_space else "never",
        "strip": int(has_space),
        "precompiled": precompiled,
    }


def _fill(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy in which the value of each name replaces "$name"."""
    if isinstance(value, dict):
        return {key: _fill(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, values) for item in value]
    return values.get(value[1:], value) if isinstance(value, str) and value.startswith("$") else value


def steps(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, also from nested sequences."""
    pending = [] if component is None else [json.loads(component.__getstate__())]
    while pending:
        step = pending.pop()
        for key in ("normalizers", "pretokenizers", "decoders"):
            pending += step.get(key, [])
        yield step
