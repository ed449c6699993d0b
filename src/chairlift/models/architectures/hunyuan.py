"""HunYuan and Hunyuan-MT (Tencent, 2025): Llama with norms of heads after the rotation.

Hunyuan-A13B has experts, and a dense network beside them, in each layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.reading.architecture import Architecture, renamed_in_layers, stacked_experts
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import read_experts
from chairlift.models.reading.gguf_header import SHARED_EXPERT, GGUFHeader
from chairlift.models.reading.layer_fields import read_head_dim
from chairlift.models.reading.llama_sizes import ExpertSizes, LlamaSizes
from chairlift.models.reading.rope_fields import read_rope, rope_parameters


class HunYuanConfigReader(LlamaConfigReader):
    """The reader of HunYuan. The base of the rotary embedding in GGUF files is already stretched."""

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        """Read the rotary embedding, whose base `alpha` stretches for any length, whatever the other factors are."""
        head_dim = read_head_dim(fields)
        fields.allow_only("attention_head_dim", head_dim, f"the size of a head is {head_dim}")
        scaling = rope_parameters(fields)
        if scaling is None or scaling.get("alpha") is None:
            return read_rope(fields, self.default_theta)
        for key in ("type", "rope_type"):
            scaling.allow_only(key, "dynamic", "alpha requires dynamic")
        scaling.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        theta = scaling.number("rope_theta", fields.number("rope_theta", self.default_theta))
        return RopeConfig(theta=theta * scaling.number("alpha") ** (head_dim / (head_dim - 2)))


def _check_no_experts(fields: ConfigFields, sizes: LlamaSizes) -> None:
    """Check that a model without a router has one expert or none."""
    if fields.get("num_experts") != 0:
        fields.allow_only("num_experts", 1, "models of this class have no router")
    fields.ignore("moe_topk", "num_experts_per_tok")


def _read_experts(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    inner = shared = sizes.intermediate_size
    if isinstance(fields, GGUFHeader):
        fields.allow_only("n_shared_experts", 1, "each layer has one network beside its experts")
        shared = fields.integer("shared_expert_intermediate_size", inner)
    return replace(read_experts(fields, "chosen", inner), shared_size=shared)


_READER: Final = HunYuanConfigReader(
    "hunyuan_v1_dense",
    qk_norm="rotated_heads",
    experts=_check_no_experts,
    required={"use_qk_norm": True, "use_cla": False, "use_rotary_pos_emb": True, "norm_type": "rms"},
    ignored=("cla_share_factor", "enable_lm_head_fp32"),
)
_MOE_READER: Final = replace(
    _READER,
    name="hunyuan_v1_moe",
    experts=_read_experts,
    field_names={"num_experts_per_tok": "moe_topk"},
    required={
        **_READER.required,
        "moe_layer_num_skipped": 0,
        "norm_topk_prob": True,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
    },
)

HUNYUAN: Final = Architecture(
    name="hunyuan",
    hf_readers={"HunYuanDenseV1ForCausalLM": _READER, "HunYuanMoEV1ForCausalLM": _MOE_READER},
    gguf_readers={"hunyuan-dense": _READER, "hunyuan-moe": _MOE_READER},
    stacked_names=stacked_experts()
    | renamed_in_layers({f"mlp.shared_experts.{name}": f"mlp.shared_mlp.{name}" for name in SHARED_EXPERT})
    | renamed_in_layers(
        {
            "self_attn.q_norm": "self_attn.query_layernorm",
            "self_attn.k_norm": "self_attn.key_layernorm",
            "mlp.gate": "mlp.gate.wg",
        }
    ),
)
