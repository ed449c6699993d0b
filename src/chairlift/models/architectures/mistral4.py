"""Mistral Small 4 (Mistral AI, 2026), without images: DeepSeek's latent attention and the query scale of Ministral 3.

The scale applies to both parts of a query. Experts are chosen by a softmax, without groups and a bias. Files hold the
gate and up projections of all experts of a layer in one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift.models.architectures.deepseek import DEEPSEEK_GGUF_NAMES, DEEPSEEK_STACKED_NAMES, DeepseekConfigReader
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.reading.architecture import Architecture, renamed_in_layers
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import SOFTMAX_GATING, read_first_dense_layers, read_routing
from chairlift.models.reading.gguf_header import GGUFHeader
from chairlift.models.reading.llama_sizes import ExpertNames, ExpertSizes, LlamaSizes
from chairlift.models.reading.rope_fields import read_rope, with_query_scale

NAMES: Final = ExpertNames(up=("mlp.experts.{}.gate_up_proj",))


@dataclass(frozen=True)
class Mistral4ConfigReader(DeepseekConfigReader):
    """The reader of Mistral Small 4."""

    rotates_part: bool = True

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        if isinstance(fields, GGUFHeader):
            return super()._rope(fields)
        rotary, plain = (fields.integer(f"qk_{part}_head_dim") for part in ("rope", "nope"))
        rope = read_rope(fields, self.default_theta, rotary / (plain + rotary))
        if rope.num_dims(plain + rotary) != rotary:
            raise fields.error("rope_parameters.partial_rotary_factor", f"must rotate qk_rope_head_dim ({rotary})")
        return with_query_scale(fields, rope)


def _read_experts(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    for key in ("n_group", "topk_group"):
        fields.allow_only(key, 1, "experts must be chosen from one group")
    fields.allow_only("expert_gating_func", SOFTMAX_GATING, f"the architecture requires {SOFTMAX_GATING} (softmax)")
    count = fields.integer("n_routed_experts")
    routing, inner = read_routing(fields, count, has_sigmoid=False), fields.integer("moe_intermediate_size")
    dense, num_shared = read_first_dense_layers(fields, sizes.num_layers), fields.integer("n_shared_experts", 0, low=0)
    return ExpertSizes(count, inner, routing, dense, NAMES, shared_size=inner * num_shared)


_READER: Final = Mistral4ConfigReader(
    "mistral4",
    experts=_read_experts,
    defaults={"norm_topk_prob": True, "n_shared_experts": 1, "q_lora_rank": 1024},
    gguf_defaults={"llama_4_scaling_beta": 0.1},  # llama.cpp's converter does not write it.
)

MISTRAL4: Final = Architecture(
    name="mistral4",
    hf_readers={"Mistral4ForCausalLM": _READER},
    gguf_readers={"mistral4": _READER},
    gguf_names=DEEPSEEK_GGUF_NAMES,
    stacked_names=DEEPSEEK_STACKED_NAMES
    | renamed_in_layers(
        {f"mlp.experts.{{}}.{name}.weight": f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    ),
)
