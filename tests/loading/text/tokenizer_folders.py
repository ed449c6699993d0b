"""Generates tokenizer folders with the classes, post-processors, flags and files that occur on the hub."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from tokenizer_corpus import strings
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL: Final = {
    "sentence": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "chat": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"],
    "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"],
}
ROLES: Final = {
    "sentence": {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "cls_token": "<s>",
        "sep_token": "</s>",
        "mask_token": "<mask>",
    },
    "bert": {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
    "chat": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
}
KINDS: Final[list[tuple[str, str, list[str], list[str]]]] = [
    ("byte_level", "chat", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizerFast"],
     ["qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "llama", "smollm3"]),
    ("byte_level", "sentence", ["GPT2TokenizerFast", "GPT2Tokenizer", "TokenizersBackend", "LlamaTokenizer"],
     ["opt", "granite", "llama", "phi3", "granitemoe"]),
    ("byte_level", "chat", ["GPTNeoXTokenizerFast", "GPTNeoXTokenizer"], ["olmoe", "olmo2", "olmo_hybrid", "llama"]),
    ("byte_level", "sentence", ["RobertaTokenizerFast", "RobertaTokenizer"], ["roberta", "llama"]),
    ("metaspace", "sentence", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "CodeLlamaTokenizer"],
     ["llama", "mistral", "mixtral", "phi3", "ministral3", "ernie4_5"]),
    ("metaspace", "gemma", ["GemmaTokenizer", "GemmaTokenizerFast", "PreTrainedTokenizerFast"],
     ["gemma", "gemma2", "gemma3", "gemma3_text", "gemma4"]),
    ("word_piece", "bert", ["BertTokenizer", "BertTokenizerFast", "DistilBertTokenizer", "PreTrainedTokenizerFast"],
     ["bert", "modernbert"]),
    ("unigram", "sentence", ["XLMRobertaTokenizer", "XLMRobertaTokenizerFast", "PreTrainedTokenizerFast"],
     ["xlm-roberta", "bert"]),
]  # fmt: skip
"""The model of the tokenizer, the names of its special tokens, and the classes and model types that have it."""


ANY_VOCABULARY: Final = ["GemmaTokenizer", "GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer"]
"""Classes that transformers makes from any vocabulary, even if it was not trained for them."""


@cache
def _trained(kind: str, names: str) -> str:
    """The tokenizer.json of a small tokenizer without a post-processor."""
    special, texts = SPECIAL[names], strings(300)
    trainer: Any
    if kind == "byte_level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet)
    elif kind == "metaspace":
        backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=[*special, *byte_tokens])
    elif kind == "word_piece":
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=1000, special_tokens=special)
    else:
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=1000, special_tokens=special, unk_token="<unk>")
    backend.train_from_iterator(texts, trainer)
    if kind == "metaspace":  # the byte tokens belong to the vocabulary only
        state = json.loads(backend.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
        return json.dumps(state)
    return backend.to_str()


def _post_processors(backend: Tokenizer, special: list[str]) -> list[Callable[[], Any]]:
    first, last = special[0], special[2]
    ids = [(text, backend.token_to_id(text) or 0) for text in (first, last)]

    def template(single: str, pair: str) -> Any:
        return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)

    return [
        lambda: None,
        lambda: processors.ByteLevel(trim_offsets=False),
        lambda: template(f"{first} $A", f"{first} $A {first} $B:1"),
        lambda: template(f"$A {last}", f"$A {last} $B:1 {last}:1"),
        lambda: template(f"{first} $A {last}", f"{first} $A {last} {last} $B {last}"),
        lambda: template("$A", "$A $B:1"),
        lambda: processors.Sequence([processors.ByteLevel(), template(f"{first} $A", f"{first} $A $B:1 {last}:1")]),
        lambda: processors.BertProcessing(ids[1], ids[0]),
        lambda: processors.RobertaProcessing(ids[1], ids[0]),
    ]


def write_folder(folder: Path, seed: int) -> dict[str, Any]:
    """Write a folder, and return the content of its tokenizer_config.json."""
    draw = random.Random(seed)
    kind, names, classes, types = KINDS[seed % len(KINDS)]
    backend = Tokenizer.from_str(_trained(kind, names))
    if (processor := draw.choice(_post_processors(backend, SPECIAL[names]))()) is not None:
        backend.post_processor = processor
    if draw.random() < 0.3:
        backend.add_tokens([AddedToken("<extra>", normalized=draw.random() < 0.5), AddedToken("kilo metre")])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    roles = {role: text for role, text in ROLES[names].items() if draw.random() < 0.9}
    settings: dict[str, Any] = {**roles, **_flags(draw)}
    if (
        name := draw.choice(
            [*classes, *classes, draw.choice(ANY_VOCABULARY), None if kind != "unigram" else classes[0]]
        )
    ) is not None:
        settings["tokenizer_class"] = name
    _add_token_files(draw, folder, backend, settings)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config: dict[str, Any] = {"model_type": draw.choice(types)}
    if draw.random() < 0.2:
        config["tokenizer_class"] = draw.choice(classes)
    (folder / "config.json").write_text(json.dumps(config))
    return settings


def _flags(draw: random.Random) -> dict[str, Any]:
    values: dict[str, list[Any]] = {
        "add_bos_token": [True, False, None],
        "add_eos_token": [True, False, None],
        "add_prefix_space": [True, False],
        "legacy": [True, False],
        "do_lower_case": [True, False],
        "tokenize_chinese_chars": [True, False],
        "strip_accents": [True, False, None],
        "clean_up_tokenization_spaces": [True, False],
        "split_special_tokens": [False],
        "model_max_length": [512],
    }
    return {key: draw.choice(choices) for key, choices in values.items() if draw.random() < 0.5}


def _add_token_files(draw: random.Random, folder: Path, backend: Tokenizer, settings: dict[str, Any]) -> None:
    """Describe the added tokens in one of the ways of transformers 3 to 5."""
    form = draw.choice(["none", "decoder", "map", "added"])
    added = backend.get_added_tokens_decoder()
    if form == "decoder":
        keys = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        settings["added_tokens_decoder"] = {
            str(i): {key: getattr(token, key) for key in keys} for i, token in added.items()
        }
    elif form == "map":
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        roles = [role for role in settings if role.endswith("_token") and not role.startswith("add_")]
        special = {role: {"content": settings.pop(role), **flags} for role in roles if draw.random() < 0.7}
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    elif form == "added":
        (folder / "added_tokens.json").write_text(json.dumps({token.content: i for i, token in added.items()}))
    if draw.random() < 0.3:
        settings[draw.choice(["additional_special_tokens", "extra_special_tokens"])] = [
            next(iter(added.values())).content
        ]
