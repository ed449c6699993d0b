"""GGUF files for tests, written with the `gguf` package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

HIDDEN, INTERMEDIATE, VOCAB, LAYERS, HEADS, KV_HEADS = 64, 96, 256, 2, 4, 2

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@contextmanager
def files_read_once() -> Iterator[None]:
    """Let transformers read a GGUF file once instead of at each call, because it does so in Python, in seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for slow_and_pure in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, slow_and_pure, lru_cache(getattr(gguf, slow_and_pure)))
        yield


def gguf_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def write_gguf(
    path: Path,
    tensors: dict[str, torch.Tensor],
    *,
    arch: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    split_max_tensors: int = 0,
    blocks: dict[str, tuple[gguf.GGMLQuantizationType, Any]] | None = None,
) -> Path:
    """Write a tiny model. `tensors` has GGUF's names; matrices are quantized, vectors are not. `metadata` overrides.

    `blocks` are bytes of matrices, [rows, bytes per row], and their type.

    With `split_max_tensors` it is written in parts of so many tensors.
    """
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
    counts = {
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "block_count": LAYERS,
        "vocab_size": VOCAB,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    for key, value in counts.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 10000.0)
    for key, value in (metadata or {}).items():
        add_value(writer, key, value)
    for name, tensor in tensors.items():
        kind = quantization if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor.numpy().astype(np.float32), kind), raw_dtype=kind)
    for name, (kind, rows) in (blocks or {}).items():
        writer.add_tensor(name, rows, raw_dtype=kind)
    return finish(writer, path)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a file with `tokenizer.ggml.*` metadata and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add_value(writer, f"tokenizer.ggml.{key}", value)
    return finish(writer, path)
