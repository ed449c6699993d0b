"""A tiny model with random weights, a tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from support.tiny_tokenizer import TEMPLATE, write_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 257,
    "bos_token_id": 256,
    "dtype": "float32",
}


def tiny_options(folder: Path, **options: Any) -> dict[str, Any]:
    """Options of an engine over a model that is written into `folder`."""
    file = str(write_tokenizer(folder) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return {"model": str(folder), "load_format": "dummy", "num_threads": 1, "seed": 0, **options}
