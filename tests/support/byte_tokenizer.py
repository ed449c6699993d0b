"""A tokenizer for the tiny models that knows every byte, EOS, special tokens, and pieces of JSON."""

from __future__ import annotations

import shutil
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from chairlift.loading.text.tokenizer import set_bos_and_eos

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|tool|>"]
"""Tokens 0 to 3; the tiny models end on 2."""
VOCAB_SIZE = 400
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
CORPUS = [
    '{"name": "Ada", "age": 36, "tags": ["x", "y"], "ok": true, "none": null, "ratio": 0.25}',
    '{"name":"Bob","items":[{"id":1,"ok":false},{"id":22,"ok":true}],"when":"2026-01-02T03:04:05Z"}',
    "The quick brown fox jumps over the lazy dog; the cat says yes, no or maybe.",
    "ÄÖÜ naïve café 漢字 ✓",
] * 4


def write_byte_tokenizer(folder: Path) -> Path:
    """tokenizer.json and its settings, with VOCAB_SIZE tokens at most."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=8,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    set_bos_and_eos(backend, bos="<bos>", eos=None)
    backend.save(str(folder / "tokenizer.json"))
    settings = '{"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}'
    (folder / "tokenizer_config.json").write_text(settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def with_byte_tokenizer(model_dir: Path, folder: Path) -> Path:
    """A copy of a tiny model, which has a vocabulary of at least VOCAB_SIZE, with this tokenizer."""
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    return write_byte_tokenizer(folder)
