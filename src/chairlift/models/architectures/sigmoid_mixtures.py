"""MiniMax-M2 (MiniMax, 2025), Hy3 (Tencent, 2026), Trinity (Arcee, 2025) and EXAONE MoE (LG AI Research, 2026): Llama
with experts that are chosen by sigmoids and a bias, as in DeepSeek-V3.

MiniMax-M2 has norms of query and key across heads, and rotates a part of each head. The others have norms of each head,
and shared experts. Trinity and EXAONE MoE have windows, and no rotary embedding in the layers without one; Trinity adds
norms after each branch, a gate of attention and a factor of the embedding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.architectures.mixtures import MIXTRAL_NAMES
from chairlift.models.architectures.olmo import exaone_windows
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.reading.architecture import Architecture, renamed_in_layers, stacked_experts
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import read_routed_experts
from chairlift.models.reading.gguf_header import POST_NORM_NAMES, SHARED_EXPERT, GGUFHeader
from chairlift.models.reading.layer_fields import read_head_dim, read_windows
from chairlift.models.reading.llama_sizes import AttentionGate, ExpertNames, LlamaSizes, NormNames
from chairlift.models.reading.rope_fields import read_rope

ONE_GROUP: Final[dict[str, Any]] = {"n_group": 1, "topk_group": 1}
DEFAULTS: Final = {**ONE_GROUP, "head_dim": 128}
FIELD_NAMES: Final = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
MINIMAX_NAMES: Final = replace(MIXTRAL_NAMES, selection_bias="block_sparse_moe.e_score_correction_bias")
HY3_NAMES: Final = ExpertNames(
    router="mlp.router.gate",
    selection_bias="mlp.expert_bias",
    shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
)
AFMOE_NAMES: Final = ExpertNames(router="mlp.router.gate", selection_bias="mlp.expert_bias")
EXAONE_NAMES: Final = ExpertNames(selection_bias="mlp.e_score_correction_bias")
"""The names in published files."""


class MiniMaxConfigReader(LlamaConfigReader):
    """The reader of MiniMax-M2, whose published files have the number of rotated dimensions in `rotary_dim`."""

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        head_dim = read_head_dim(fields)
        rotated = fields.integer("rotary_dim", head_dim, high=head_dim)
        return read_rope(fields, self.default_theta, rotated / head_dim)


class AfmoeConfigReader(LlamaConfigReader):
    """The reader of Trinity."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = replace(super().read_sizes(fields), attention_gate=AttentionGate("gate_proj"))
        is_scaled = isinstance(fields, GGUFHeader) or fields.flag("mup_enabled", False)
        return replace(sizes, embedding_multiplier=math.sqrt(sizes.hidden_size)) if is_scaled else sizes


_MINIMAX: Final = MiniMaxConfigReader(
    "minimax_m2",
    qkv_bias=False,
    qk_norm="rows",
    default_theta=5e6,
    experts=partial(read_routed_experts, names=MINIMAX_NAMES),
    field_names={"n_routed_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    defaults=DEFAULTS,
    required={
        "attn_type_list": 1,
        "norm_topk_prob": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    ignored=("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
)
_HY3: Final = LlamaConfigReader(
    "hy_v3",
    reads_mlp_bias=True,
    qk_norm="heads",
    default_theta=11_158_840.0,
    experts=partial(read_routed_experts, names=HY3_NAMES),
    field_names={**FIELD_NAMES, "routed_scaling_factor": "router_scaling_factor", "norm_topk_prob": "route_norm"},
    defaults={**DEFAULTS, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.826},
    required={
        "first_k_dense_replace": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "norm_topk_prob": True,
        "qk_norm": True,
    },
    ignored=("expert_hidden_dim", "enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"),
)
_AFMOE: Final = AfmoeConfigReader(
    "afmoe",
    partial(read_windows, pattern=4, default=1024),
    norms=NormNames(
        after_attention="post_attention_layernorm", before_mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm"
    ),
    qk_norm="heads",
    rotates_windows_only=True,
    experts=partial(read_routed_experts, names=AFMOE_NAMES),
    field_names={
        **FIELD_NAMES,
        "routed_scaling_factor": "route_scale",
        "norm_topk_prob": "route_norm",
        "scoring_func": "score_func",
        "first_k_dense_replace": "num_dense_layers",
        "sliding_window_pattern": "global_attn_every_n_layers",
    },
    defaults={**DEFAULTS, "first_k_dense_replace": 1, "n_shared_experts": 2},
    required={**ONE_GROUP, "norm_topk_prob": True, "num_expert_groups": 1, "num_limited_groups": 1},
)
_EXAONE: Final = LlamaConfigReader(
    "exaone_moe",
    exaone_windows,
    qkv_bias=False,
    qk_norm="heads",
    rotates_windows_only=True,
    experts=partial(read_routed_experts, names=EXAONE_NAMES),
    field_names=FIELD_NAMES,
    defaults={**ONE_GROUP, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
    ignored=("first_last_k_dense_replace", "is_moe_layer"),
)

MINIMAX_M2: Final = Architecture(
    name="minimax_m2",
    hf_readers={"MiniMaxM2ForCausalLM": _MINIMAX},
    gguf_readers={"minimax-m2": _MINIMAX},
    stacked_names=stacked_experts(MINIMAX_NAMES)
    | renamed_in_layers(
        {
            "block_sparse_moe.gate": "mlp.gate",
            "block_sparse_moe.e_score_correction_bias": "mlp.e_score_correction_bias",
        }
    ),
)
HY3: Final = Architecture(
    name="hy_v3",
    hf_readers={"HYV3ForCausalLM": _HY3},
    gguf_readers={"hy_v3": _HY3},
    stacked_names=stacked_experts(HY3_NAMES)
    | renamed_in_layers({f"mlp.shared_mlp.{name}": f"mlp.shared_experts.{name}" for name in SHARED_EXPERT})
    | renamed_in_layers({"mlp.router.gate": "mlp.gate", "mlp.expert_bias": "mlp.e_score_correction_bias"}),
)
AFMOE: Final = Architecture(
    name="afmoe",
    hf_readers={"AfmoeForCausalLM": _AFMOE},
    gguf_readers={"afmoe": _AFMOE},
    gguf_names=POST_NORM_NAMES,
    stacked_names=stacked_experts(AFMOE_NAMES),
)
EXAONE_MOE: Final = Architecture(
    name="exaone_moe",
    hf_readers=dict.fromkeys(("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"), _EXAONE),
    gguf_readers={"exaone-moe": _EXAONE},
    stacked_names=stacked_experts(EXAONE_NAMES)
    | renamed_in_layers({"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"}),
    unread_prefixes=("mtp.",),
)
