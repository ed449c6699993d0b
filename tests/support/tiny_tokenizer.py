"""A vocabulary of words for the tiny models."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def add_tokenizer(model_dir: Path, folder: Path) -> Path:
    """A copy of a tiny model (vocabulary of 256) with a tokenizer: ASCII, and a word for every other token, so that
    every token is text at once."""
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_tokenizer(folder: Path) -> Path:
    """Its tokenizer.json alone, into a folder that is made if need be."""
    folder.mkdir(exist_ok=True)
    alphabet = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ", "Ċ"]
    vocab = alphabet + [f"Ġ{first}{second}" for first in "abcdefghijklm" for second in "nopqrstuvwxyz"]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocab[:256])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return folder
