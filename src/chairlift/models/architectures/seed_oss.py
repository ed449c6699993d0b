"""Seed-OSS (ByteDance, 2025): Llama with biases of query, key and value."""

from __future__ import annotations

from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, no_windows, uniform_windows
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.gguf_header import GGUF_NAMES

SEED_OSS: Final = Architecture(
    name="seed_oss",
    hf_readers={
        "SeedOssForCausalLM": LlamaConfigReader(
            "seed_oss",
            no_windows,
            output_bias_key="attention_out_bias",
            reads_mlp_bias=True,
            defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
        )
    },
    gguf_readers={"seed_oss": LlamaConfigReader("seed_oss", uniform_windows)},
    gguf_names={**GGUF_NAMES, "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm"},
)
