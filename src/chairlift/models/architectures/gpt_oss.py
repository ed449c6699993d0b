"""gpt-oss (OpenAI, 2025): `LlamaSizes` with sinks, windows in every other layer and experts with biases.

Experts have a clamped activation. Safetensors files hold the gate and up projections of all experts in alternate rows
of one tensor, in MXFP4 or in transposed floats.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from chairlift.kernels.activations import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT
from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture, StoredName
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields
from chairlift.models.reading.expert_fields import read_experts
from chairlift.models.reading.gguf_header import POST_NORM_NAMES, GGUFHeader
from chairlift.models.reading.layer_fields import read_windows
from chairlift.models.reading.llama_sizes import ExpertNames, ExpertSizes, LlamaSizes


class GptOssConfigReader(LlamaConfigReader):
    """The reader of gpt-oss. GGUF files do not contain that YaRN is not truncated."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        for key, value in (("swiglu_alpha", SWIGLUOAI_ALPHA), ("swiglu_limit", SWIGLUOAI_LIMIT)):
            fields.allow_only(key, value, f"experts must be activated with {key} {value}")
        return replace(self.read_sizes(fields), activation="swigluoai", attention_sinks=True).declare()

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        if isinstance(fields, GGUFHeader):
            return replace(super()._rope(fields), truncate=False)
        if fields.get("rope_parameters") is None:
            fields.get("rope_scaling", REQUIRED)
        rope = super()._rope(fields)
        original = rope.original_max_position_embeddings
        fields.allow_only("initial_context_length", original, f"original_max_position_embeddings is {original}")
        return rope

    def _biases(self, fields: ConfigFields) -> tuple[bool, bool, bool]:
        bias = fields.flag("attention_bias", True)
        return bias, bias, False


def _read_experts(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    experts = read_experts(fields, "chosen", sizes.intermediate_size, ExpertNames(router="mlp.router"))
    chosen = experts.routing.experts_per_token
    fields.allow_only("experts_per_token", chosen, f"num_experts_per_tok is {chosen}")
    return replace(experts, has_bias=True)


EXPERTS: Final = "model.layers.{}.mlp.experts"


def _expert_places(name: str, tensor: str, first_row: int = 0, row_step: int = 1) -> dict[str, StoredName]:
    """Return the places of the weights and the biases of one projection of all experts."""
    place = StoredName(f"{EXPERTS}.{tensor}", is_transposed=True, first_row=first_row, row_step=row_step)
    bias = place._replace(name=f"{EXPERTS}.{tensor}_bias", is_transposed=False)
    return {f"{EXPERTS}.{{}}.{name}.weight": place, f"{EXPERTS}.{{}}.{name}.bias": bias}


_READER: Final = GptOssConfigReader(
    "gpt-oss", partial(read_windows, pattern=2), experts=_read_experts, default_theta=150_000.0
)
"""Every second layer has no window."""

GPT_OSS: Final = Architecture(
    name="gpt-oss",
    hf_readers={"GptOssForCausalLM": _READER},
    gguf_readers={"gpt-oss": _READER},
    gguf_names={**POST_NORM_NAMES, "model.layers.{}.mlp.router": "blk.{}.ffn_gate_inp"},
    stacked_names={
        "model.layers.{}.self_attn.sinks.weight": "model.layers.{}.self_attn.sinks",
        **_expert_places("gate_proj", "gate_up_proj", first_row=0, row_step=2),
        **_expert_places("up_proj", "gate_up_proj", first_row=1, row_step=2),
        **_expert_places("down_proj", "down_proj"),
    },
)
