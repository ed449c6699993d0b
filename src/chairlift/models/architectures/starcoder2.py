"""StarCoder2 (BigCode, 2024): Llama with LayerNorm, windows, biases in all projections, and an ungated network.

x + attention(norm(x)), then x + c_proj(gelu(c_fc(norm(x))))
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, uniform_windows
from chairlift.models.declaration.feed_forward_spec import declare_network
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec
from chairlift.models.declaration.matrix_spec import NormSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_header import GGUF_NAMES, GGUFHeader, names_in_layers
from chairlift.models.reading.llama_sizes import LlamaSizes


class Starcoder2ConfigReader(LlamaConfigReader):
    """The reader of StarCoder2, in both kinds of files."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        sizes = self.read_sizes(fields)
        fields.ignore("rms_norm_eps")  # Files of the 15B model have it beside the epsilon of LayerNorm.
        layers = tuple(_declare_layer(sizes, index) for index in range(sizes.num_layers))
        return replace(sizes.declare(), layers=layers, final_norm=_norm(sizes, "model.norm"))

    def _activation(self, fields: ConfigFields) -> str:
        fields.choice("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        return self.activation

    def _biases(self, fields: ConfigFields) -> tuple[bool, bool, bool]:
        found = super()._biases(fields)  # Rejects the fields of other models.
        if isinstance(fields, GGUFHeader):
            return found
        bias = fields.flag("use_bias", True)
        return bias, bias, bias


def _declare_layer(sizes: LlamaSizes, index: int) -> LayerSpec:
    prefix, size = f"model.layers.{index}", sizes.hidden_size
    up, down = ((f"{prefix}.mlp.c_fc", sizes.intermediate_size),), f"{prefix}.mlp.c_proj"
    return LayerSpec(
        attention=sizes.declare_attention(f"{prefix}.self_attn", index),
        attention_norms=BranchNorms(_norm(sizes, f"{prefix}.input_layernorm")),
        feed_forward=declare_network(up, down, size, sizes.activation, gated=False, has_bias=sizes.mlp_bias),
        feed_forward_norms=BranchNorms(_norm(sizes, f"{prefix}.post_attention_layernorm")),
    )


def _norm(sizes: LlamaSizes, name: str) -> NormSpec:
    return NormSpec("layer_norm", name, sizes.hidden_size, sizes.norm_eps)


_READER: Final = Starcoder2ConfigReader(
    "starcoder2",
    uniform_windows,
    qkv_bias=False,
    activation="gelu_tanh",
    eps_key="layer_norm_eps",
    field_names={"layer_norm_eps": "norm_epsilon"},
    required={"mlp_type": "default", "norm_type": "layer_norm"},
    defaults={"layer_norm_eps": 1e-5, "num_key_value_heads": 2, "tie_word_embeddings": True},
)

STARCODER2: Final = Architecture(
    name="starcoder2",
    hf_readers={"Starcoder2ForCausalLM": _READER},
    gguf_readers={"starcoder2": _READER},
    gguf_names={**GGUF_NAMES, **names_in_layers("mlp", {"c_fc": "ffn_up", "c_proj": "ffn_down"})},
)
