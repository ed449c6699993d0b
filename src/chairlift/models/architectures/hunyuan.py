"""HunYuan without experts (Tencent, 2025), and Hunyuan-MT: Llama with norms of heads after the rotation."""

from __future__ import annotations

from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, no_windows
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_header import GGUF_NAMES
from chairlift.models.reading.layer_fields import read_head_dim
from chairlift.models.reading.rope_fields import read_rope

FIXED: Final = {"use_qk_norm": True, "use_cla": False, "use_rotary_pos_emb": True, "norm_type": "rms"}
"""The only supported values of these fields."""


class HunYuanConfigReader(LlamaConfigReader):
    """The reader of HunYuan. The base of the rotary embedding in GGUF files is already stretched."""

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        """Read the rotary embedding, whose base `alpha` stretches for any length, whatever the other factors are."""
        head_dim = read_head_dim(fields, fields.uniform("num_attention_heads"))
        for key, value in {**FIXED, "attention_head_dim": head_dim}.items():
            fields.allow_only(key, value, f"the only supported value is {value!r}")
        if fields.get("num_experts") != 0:  # One expert, and none, is a network without a router.
            fields.allow_only("num_experts", 1, "models with experts are not supported")
        fields.ignore("cla_share_factor", "enable_lm_head_fp32", "moe_topk", "num_experts_per_tok")
        scaling = fields.mapping("rope_parameters") or fields.mapping("rope_scaling")
        if scaling is None or scaling.get("alpha") is None:
            return read_rope(fields, self.default_theta)
        for key in ("type", "rope_type"):
            scaling.allow_only(key, "dynamic", "alpha requires dynamic")
        scaling.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        theta = scaling.number("rope_theta", fields.number("rope_theta", self.default_theta))
        return RopeConfig(theta=theta * scaling.number("alpha") ** (head_dim / (head_dim - 2)))


_READER: Final = HunYuanConfigReader("hunyuan_v1_dense", no_windows, qk_norm="rotated_heads")
_NORM: Final = "model.layers.{}.self_attn."

HUNYUAN: Final = Architecture(
    name="hunyuan",
    hf_readers={"HunYuanDenseV1ForCausalLM": _READER},
    gguf_readers={"hunyuan-dense": _READER},
    gguf_names=GGUF_NAMES,
    stacked_names={f"{_NORM}q_norm": f"{_NORM}query_layernorm", f"{_NORM}k_norm": f"{_NORM}key_layernorm"},
)
