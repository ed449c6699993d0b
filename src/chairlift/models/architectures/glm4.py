"""GLM-4-0414 (Z.ai, 2025), and GLM-4.5, 4.6 and 4.7 with experts as in DeepSeek-V3, without images.

Both rotate the first half of each head. GLM-4-0414 has norms before and after each branch, and the two dimensions of a
rotated pair in adjacent rows. Layers that predict further tokens (MTP) are not loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift.models.architectures.deepseek import (
    DEEPSEEK_GGUF_NAMES,
    DeepseekConfigReader,
    declare_layer,
    read_gguf_mixture,
    read_shared_size,
)
from chairlift.models.architectures.llama import LlamaConfigReader, no_windows
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture, GGUFHeader, StoredName
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_sizes import GGUF_NAMES, read_gguf_sizes
from chairlift.models.reading.layer_fields import read_head_dim
from chairlift.models.reading.llama_sizes import LlamaSizes, NormNames
from chairlift.models.reading.rope_fields import read_partial_rope

NORMS: Final = NormNames(
    after_attention="post_self_attn_layernorm",
    after_mlp="post_mlp_layernorm",
)
FUSED: Final = ("gate_up_proj",)
ROTATED_SHARE: Final = 0.5


def _read_rope(fields: ConfigFields) -> RopeConfig:
    """Read the rotary embedding, which every published model has in the first half of a head."""
    share, rope = read_partial_rope(fields, 10_000.0, ROTATED_SHARE)
    if share != ROTATED_SHARE:
        raise fields.error("partial_rotary_factor", f"is {share:g}, which is not supported; supported: {ROTATED_SHARE}")
    heads = fields.integer("num_attention_heads")
    head_dim = read_head_dim(fields, "head_dim", "hidden_size", "num_attention_heads", heads)
    return replace(rope, rotary_dim=head_dim // 2)


class Glm4ConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of GLM-4-0414."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        return replace(super().read_sizes(fields), fused_projections=FUSED)

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        return _read_rope(fields)


class Glm4MoeConfigReader(DeepseekConfigReader):
    """The reader of the `config.json` of GLM-4.5, 4.6 and 4.7."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        sizes = self.read_sizes(fields)
        experts = self.read_experts(fields, sizes.num_layers)
        qk_norm = fields.flag("use_qk_norm", False)
        config = _declare_mixture(
            replace(sizes, experts=experts, qk_norm="heads" if qk_norm else None), read_shared_size(fields, experts)
        )
        return replace(config, num_unread_layers=fields.integer("num_nextn_predict_layers", 1, low=0))

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        return _read_rope(fields)


def _declare_mixture(sizes: LlamaSizes, shared_size: int) -> ModelConfig:
    layers = tuple(declare_layer(sizes, index, shared_size) for index in range(sizes.num_layers))
    return replace(sizes.declare(), layers=layers)


def read_glm4_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of GLM-4-0414."""
    sizes = read_gguf_sizes(header, rotates_part=True)
    if sizes.rope.num_dims(sizes.head_dim) != sizes.head_dim // 2:
        raise header.fields.error("rope.dimension_count", f"must be {sizes.head_dim // 2}, one half of a head")
    return replace(sizes, norms=NORMS, fused_projections=FUSED).declare()


def read_glm4_moe_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of GLM-4.5, 4.6 or 4.7."""
    sizes, shared_size = read_gguf_mixture(header)
    has_norms = "blk.0.attn_q_norm.weight" in header.tensor_names
    return _declare_mixture(replace(sizes, qk_norm="heads" if has_norms else None), shared_size)


_PAIRS: Final = {
    f"model.layers.{{}}.self_attn.{name}_proj": StoredName(f"blk.{{}}.attn_{name}", block="half_pair") for name in "qk"
}

GLM4: Final = Architecture(
    name="glm4",
    hf_readers={
        "Glm4ForCausalLM": Glm4ConfigReader(
            "glm4",
            no_windows,
            output_bias_key=None,
            norms=NORMS,
            defaults={"head_dim": 128, "attention_bias": True},
        )
    },
    gguf_readers={"glm4": read_glm4_gguf},
    gguf_names={
        **GGUF_NAMES,
        **_PAIRS,
        "model.layers.{}.post_self_attn_layernorm": "blk.{}.post_attention_norm",
        "model.layers.{}.mlp.gate_up_proj": "blk.{}.ffn_up",
        "model.layers.{}.post_mlp_layernorm": "blk.{}.post_ffw_norm",
    },
    stacked_names={name: place._replace(name=name) for name, place in _PAIRS.items()},
)
GLM4_MOE: Final = Architecture(
    name="glm4_moe",
    hf_readers={
        "Glm4MoeForCausalLM": Glm4MoeConfigReader("glm4_moe", no_windows, output_bias_key=None, num_dense_layers=1)
    },
    gguf_readers={"glm4moe": read_glm4_moe_gguf},
    gguf_names={
        **DEEPSEEK_GGUF_NAMES,
        "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
    },
)
