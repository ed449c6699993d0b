"""LFM3 (Liquid AI, 2026): LFM2 with windows in some layers, a gate of each query head, and norms after each branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from chairlift.models.architectures.lfm2 import RENAMED_NETWORKS, declare_convolutions
from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture, renamed_in_layers
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields
from chairlift.models.reading.layer_fields import check_recurrent_layers, read_width
from chairlift.models.reading.llama_sizes import AttentionGate, LlamaSizes, NormNames
from chairlift.models.reading.rope_fields import read_type_ropes

LAYER_TYPES: Final = {"conv": True, "sliding_attention": False, "full_attention": False}
"""Type of a layer -> whether it has a convolution in place of attention."""

PATTERN: Final = ("sliding_attention", "conv", "full_attention", "conv")
"""The types of layers in files that do not contain them; the first layer is a convolution."""

DEFAULT_ROPES: Final[dict[str, dict[str, Any]]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
"""The rotary embeddings of files without rope_parameters."""

DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "vocab_size": 128_000,
}
"""The values of fields that a `config.json` does not contain, as in transformers' `Lfm3Config`."""

NORMS: Final = NormNames("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")


class Lfm3ConfigReader(LlamaConfigReader):
    """The reader of LFM3."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        sizes = self.read_sizes(fields)
        types = _read_types(fields, sizes.num_layers)
        recurrent = check_recurrent_layers(fields, "layer_types", types, sizes.num_layers, LAYER_TYPES)
        width = read_width(fields, "conv_L_cache", 7)
        return declare_convolutions(sizes, recurrent, width, fields.flag("conv_bias", False))

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        has_gate, has_norms = (fields.flag(key, True) for key in ("use_attention_gate", "use_sandwich_norm"))
        return replace(
            sizes,
            attention_gate=AttentionGate("gate_proj", is_per_head=True) if has_gate else None,
            norms=NORMS if has_norms else replace(NORMS, after_attention=None, after_mlp=None),
            ropes=read_type_ropes(fields, sizes.sliding_windows, [sizes.head_dim] * sizes.num_layers, DEFAULT_ROPES),
        )


def _read_types(fields: ConfigFields, layers: int) -> Any:
    return fields.get("layer_types", [PATTERN[index % len(PATTERN)] if index else "conv" for index in range(layers)])


def _windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    window, types = fields.window(256), _read_types(fields, layers)
    check_recurrent_layers(fields, "layer_types", types, layers, LAYER_TYPES)
    if window is None and "sliding_attention" in types:
        fields.get("sliding_window", REQUIRED)
    return [window if kind == "sliding_attention" else None for kind in types]


_READER: Final = Lfm3ConfigReader(
    "lfm3", _windows, qk_norm="heads", reads_rope=False, eps_key="norm_eps", defaults=DEFAULTS
)

LFM3: Final = Architecture(
    name="lfm3",
    hf_readers={"Lfm3ForCausalLM": _READER},
    stacked_names=RENAMED_NETWORKS | renamed_in_layers({"self_attn.gate_proj": "self_attn.g_proj"}),
)
