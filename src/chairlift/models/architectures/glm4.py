"""GLM-4-0414 (Z.ai, 2025), GLM-4.5, 4.6 and 4.7 with experts as in DeepSeek-V3, without images, and Solar Open.

GLM rotates the first half of each head. GLM-4-0414 has norms before and after each branch, and the two dimensions of a
rotated pair in adjacent rows. Layers that predict further tokens (MTP) are not loaded. Solar Open (Upstage, 2026) is
GLM-4.5 with experts in every layer and whole heads that are rotated; its GGUF files are of GLM-4.5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.reading.architecture import Architecture, StoredName, stacked_experts
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import read_routed_experts
from chairlift.models.reading.gguf_header import GGUF_NAMES, POST_NORM_NAMES, GGUFHeader
from chairlift.models.reading.layer_fields import read_head_dim
from chairlift.models.reading.llama_sizes import LlamaSizes, NormNames
from chairlift.models.reading.rope_fields import read_rope

ROTATED_SHARE: Final = 0.5


class Glm4ConfigReader(LlamaConfigReader):
    """The reader of GLM-4-0414, which has the pairs of the first half of a head in adjacent rows."""

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        rope = read_rope(fields, self.default_theta, ROTATED_SHARE)
        head_dim = read_head_dim(fields)
        if (dims := rope.num_dims(head_dim)) != head_dim // 2:
            raise fields.error(
                "partial_rotary_factor",
                f"rotates {dims} of {head_dim} dimensions; supported: one half of a head",
            )
        return rope


class Glm4MoeConfigReader(LlamaConfigReader):
    """The reader of GLM-4.5, 4.6 and 4.7, and of Solar Open."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        if isinstance(fields, GGUFHeader):
            has_norms = "blk.0.attn_q_norm.weight" in fields.tensor_names
        else:
            has_norms = fields.flag("use_qk_norm", False)
        return replace(sizes, qk_norm="heads" if has_norms else None)


_READER: Final = Glm4ConfigReader(
    "glm4",
    output_bias_key=None,
    norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    fused_projections=("gate_up_proj",),
    defaults={"head_dim": 128, "attention_bias": True},
)
_MOE_READER: Final = Glm4MoeConfigReader(
    "glm4_moe",
    output_bias_key=None,
    experts=read_routed_experts,
    rotated_share=ROTATED_SHARE,
    defaults={"first_k_dense_replace": 1, "n_shared_experts": 1, "num_nextn_predict_layers": 1},
    gguf_defaults={"norm_topk_prob": False},
)
_SOLAR: Final = replace(
    _MOE_READER,
    name="solar_open",
    inner_key="moe_intermediate_size",
    rotated_share=1.0,
    default_theta=1e6,
    defaults={"head_dim": 128, "n_group": 1, "n_shared_experts": 1, "topk_group": 1},
    required={"use_qk_norm": False, "first_k_dense_replace": 0, "mlp_layer_types": None},
    ignored=("intermediate_size",),
)

_PAIRS: Final = {
    f"model.layers.{{}}.self_attn.{name}_proj": StoredName(f"blk.{{}}.attn_{name}", block="half_pair") for name in "qk"
}

GLM4: Final = Architecture(
    name="glm4",
    hf_readers={"Glm4ForCausalLM": _READER},
    gguf_readers={"glm4": _READER},
    gguf_names={
        **GGUF_NAMES,
        **_PAIRS,
        "model.layers.{}.post_self_attn_layernorm": "blk.{}.post_attention_norm",
    },
    stacked_names={name: place._replace(name=name) for name, place in _PAIRS.items()},
)
GLM4_MOE: Final = Architecture(
    name="glm4_moe",
    hf_readers={"Glm4MoeForCausalLM": _MOE_READER, "SolarOpenForCausalLM": _SOLAR},
    gguf_readers={"glm4moe": _MOE_READER},
    gguf_names=POST_NORM_NAMES,
    stacked_names=stacked_experts(),
)
