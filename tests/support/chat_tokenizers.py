"""Small tokenizers of the families that chat models use, with added tokens that chat templates write."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from chairlift.loading.text.gguf_tokenizer import PRE_TOKENIZERS
from chairlift.loading.text.tokenizer import set_bos_and_eos

SPECIAL: Final = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "<|start_of_role|>",
    "<|end_of_role|>",
    "<|end_of_text|>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|turn>",
    "<turn|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<|channel>",
    "<channel|>",
]
MARKUP: Final = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Added tokens that are not special, as in Qwen 3."""
WHITE_SPACE: Final = ["  ", "\n\n", "é"]
"""Added tokens that are ordinary text, as in Gemma and GPT-NeoX."""
CORPUS: Final = [
    "The quick brown fox jumps over the lazy dog.\nsystem\nuser\nassistant\n",
    "tool think im_start im_end <|im_start|>user <tool_call> </s> <s> [INST] [/INST] eot_id",
    '{"name": "get_weather", "arguments": {"city": "Rome", "n": 12}}\n  é 漢字 ✓',
] * 6


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE with the expression of Qwen 2 and NFC."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS["qwen2"].patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return _trained(backend, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def unsplit_bytes() -> tokenizers.Tokenizer:
    """Byte-level BPE without an expression: merges reach across everything, into whole spellings of tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _trained(backend, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def sentencepiece() -> tokenizers.Tokenizer:
    """SentencePiece BPE as Llama 2 has it: a space before each piece, by a normalizer."""
    backend = _sentencepiece_model()
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def normalized_markup() -> tokenizers.Tokenizer:
    """As `sentencepiece`, but markup matches normalized text, so the library expects a space before it."""
    backend = tokenizers.Tokenizer(_sentencepiece_model().model)
    backend.normalizer = sentencepiece().normalizer
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ["<unk>", *SPECIAL]])
    backend.add_tokens([AddedToken(token, normalized=True) for token in MARKUP + WHITE_SPACE])
    set_bos_and_eos(backend, bos="<s>", eos=None)
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """SentencePiece BPE as Mistral has it: a space at the beginning of the text only."""
    backend = _sentencepiece_model()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def unigram() -> tokenizers.Tokenizer:
    """A unigram model whose control tokens are in the vocabulary with the best score of all."""
    characters = sorted(set("".join(CORPUS)) - {" "})
    words = ["▁", "▁the", "▁quick", "user", "system", "im_start", "im_end"]
    vocabulary = [("<unk>", 0.0), *((token, 0.0) for token in SPECIAL), *((text, -3.0) for text in words + characters)]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.add_special_tokens(["<unk>"])
    return _with_added_tokens(backend)


def flags() -> tokenizers.Tokenizer:
    """Byte-level BPE whose added tokens take spaces beside them, match only as words, or match normalized text."""
    backend = byte_level()
    extra = tokenizers.Tokenizer(backend.model)
    extra.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    extra.pre_tokenizer = backend.pre_tokenizer
    extra.decoder = backend.decoder
    options: list[dict[str, Any]] = [
        {"rstrip": True},
        {"lstrip": True},
        {"single_word": True},
        {"normalized": True},
        {"normalized": False},
    ]
    for index, token in enumerate(SPECIAL):
        chosen = {"normalized": False, **options[index % len(options)]}
        extra.add_special_tokens([AddedToken(token, special=True, **chosen)])
    extra.add_tokens([AddedToken(token, normalized=True) for token in MARKUP + WHITE_SPACE])
    set_bos_and_eos(extra, bos="<s>", eos="</s>")
    return extra


def _sentencepiece_model() -> tokenizers.Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(set("".join(CORPUS)) - {" "})]
    merges = [
        ("<", "s"),
        ("<s", ">"),
        ("<", "/"),
        ("</", "s"),
        ("</s", ">"),
        ("i", "m"),
        ("u", "s"),
        ("e", "r"),
        ("us", "er"),
    ]
    tokens += ["".join(merge) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>"])
    return _with_added_tokens(backend)


def _trained(backend: tokenizers.Tokenizer, **options: Any) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, **options)
    backend.train_from_iterator(CORPUS, trainer)
    return _with_added_tokens(backend)


def _with_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in MARKUP + WHITE_SPACE])
    set_bos_and_eos(backend, bos="<s>", eos="</s>")
    return backend


BACKENDS: Final[dict[str, Callable[[], tokenizers.Tokenizer]]] = {
    make.__name__: cache(make)
    for make in (byte_level, unsplit_bytes, sentencepiece, normalized_markup, metaspace, unigram, flags)
}
"""Each is built once; tests must not change them."""
