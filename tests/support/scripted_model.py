"""A tiny Llama whose answer is a fixed list of words: its head maps each token to the next one of the list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

from support.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from support.tiny_engine import CONFIG

LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
EOS = 2
SIZE = 448
"""The number of tokens and the hidden size, so that embeddings are unit vectors."""


def write_scripted_model(
    folder: Path, words: Sequence[str], template: str, special: Sequence[str] = (), start: str = "\n"
) -> Path:
    """A folder with a model that answers with these words, then EOS, after a prompt whose last token is `start`.

    Args:
        words: different texts; each is an added token.
        special: the words that are special tokens.
    """
    write_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(f"<unused{i}>") for i in range(VOCAB_SIZE - backend.get_vocab_size())])
    for word in words:
        backend.add_tokens([tokenizers.AddedToken(word, special=word in special, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    (first,) = backend.encode(start, add_special_tokens=False).ids
    tokens = [first, *map(backend.token_to_id, words), EOS]
    head = torch.zeros(SIZE, SIZE)
    head[tokens[1:], tokens[:-1]] = 4.0
    layer = "model.layers.0."
    weights = {"model.embed_tokens.weight": torch.eye(SIZE), "lm_head.weight": head}
    weights |= {f"{layer}{name}.weight": torch.zeros(SIZE, SIZE) for name in LINEAR}
    weights |= {f"{layer}mlp.{name}_proj.weight": torch.zeros(64, SIZE) for name in ("gate", "up")}
    weights[f"{layer}mlp.down_proj.weight"] = torch.zeros(SIZE, 64)
    norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    save_file(weights | {f"{name}.weight": torch.ones(SIZE) for name in norms}, folder / "model.safetensors")
    sizes = {"vocab_size": SIZE, "hidden_size": SIZE, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 7, "num_key_value_heads": 7, "eos_token_id": EOS, "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes, **heads, "tie_word_embeddings": False}))
    return folder
