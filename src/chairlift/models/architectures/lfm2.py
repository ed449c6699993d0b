"""LFM2, LFM2.5 and LFM3 (Liquid AI, 2025 and 2026): `LlamaSizes` with short convolutions in place of attention in most
layers.

LFM2-MoE has experts in all but the first layers. They are chosen by sigmoids with a bias. LFM3 adds windows in some
layers, a gate of each query head, and norms after each branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.matrix_spec import RECURRENCE, MatrixSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.declaration.recurrence_spec import ConvolutionSpec, RecurrenceSpec
from chairlift.models.reading.architecture import Architecture, renamed_in_layers
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields
from chairlift.models.reading.expert_fields import SIGMOID_GATING, read_experts, read_softmax
from chairlift.models.reading.gguf_header import GGUF_NAMES, GGUFHeader, names_in_layers
from chairlift.models.reading.layer_fields import check_recurrent_layers, read_width
from chairlift.models.reading.llama_sizes import AttentionGate, ExpertNames, ExpertSizes, LlamaSizes, NormNames
from chairlift.models.reading.rope_fields import read_type_ropes

LAYER_TYPES: Final = {"conv": True, "full_attention": False}
"""Type of a layer -> whether it has a convolution in place of attention."""

NAMES: Final = ExpertNames(
    router="feed_forward.gate",
    up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    down="feed_forward.experts.{}.w2",
    selection_bias="feed_forward.expert_bias",
)


def _declare(fields: ConfigFields, sizes: LlamaSizes, recurrent: Sequence[bool], width: int) -> ModelConfig:
    """Return the declaration of a model with short convolutions.

    Args:
        recurrent: whether each layer has a convolution in place of attention.
        width: the width of the convolution in a `config.json` that does not contain it.
    """
    width, has_bias = read_width(fields, "conv_L_cache", width), fields.flag("conv_bias", False)
    hidden = sizes.hidden_size

    def convolution(index: int) -> RecurrenceSpec:
        prefix = f"model.layers.{index}.conv"
        rows, output = ((f"{prefix}.in_proj", 3 * hidden),), ((f"{prefix}.out_proj", hidden),)
        return RecurrenceSpec(
            input=MatrixSpec(RECURRENCE, "conv_in", rows, hidden, has_bias),
            output=MatrixSpec(RECURRENCE, "conv_out", output, hidden, has_bias),
            convolution=ConvolutionSpec(f"{prefix}.conv", hidden, width, has_bias),
        )

    return sizes.declare().with_recurrences(recurrent, convolution)


class Lfm2ConfigReader(LlamaConfigReader):
    """The reader of LFM2 and LFM2-MoE."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        sizes = self.read_sizes(fields)
        _check_other_names(fields, sizes)
        recurrent = _read_layers(fields, sizes.num_layers)
        return _declare(fields, sizes, recurrent, width=3)

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        if self.experts is None:
            sizes = replace(sizes, intermediate_size=_read_inner_size(fields))
        if fields.get("tie_embedding") is not None:
            sizes = replace(sizes, tie_word_embeddings=fields.flag("tie_embedding"))
        return sizes


def _read_inner_size(fields: ConfigFields) -> int:
    """Read the inner size of the feed-forward network: two thirds of the field, rounded up to a multiple."""
    inner = fields.integer("block_ff_dim", fields.uniform("intermediate_size"))
    multiplier = fields.number("block_ffn_dim_multiplier", 1.0)
    multiple = fields.integer("block_multiple_of", 256)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    return -(-int(multiplier * int(2 * inner / 3)) // multiple) * multiple


def _read_experts(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    """Read the experts, which are chosen by sigmoids, and are not in the first layers."""
    names = NAMES if fields.flag("use_expert_bias", True) else replace(NAMES, selection_bias=None)
    experts = read_experts(fields, read_softmax(fields), names=names, gating=SIGMOID_GATING)
    scale = fields.number("routed_scaling_factor", 1.0)
    routing = replace(experts.routing, has_sigmoid=True, sum_eps=1e-6, scale=scale)
    num_dense = fields.integer("num_dense_layers", 2, low=0, high=sizes.num_layers)
    return replace(experts, routing=routing, dense_layers=frozenset(range(num_dense)))


def _check_other_names(fields: ConfigFields, sizes: LlamaSizes) -> None:
    """Check the fields of the published files that have the values of other fields, or no effect."""
    same = {
        "block_dim": sizes.hidden_size,
        "block_norm_eps": sizes.norm_eps,
        "block_use_swiglu": True,
        "conv_dim": sizes.hidden_size,
        "conv_dim_out": sizes.hidden_size,
        "num_heads": sizes.num_heads,
        "theta": sizes.rope.theta,
        "use_pos_enc": True,
    }
    for key, value in same.items():
        fields.allow_only(key, value, f"LFM2 models have {value} here")


def _read_layers(fields: ConfigFields, layers: int) -> list[bool]:
    if isinstance(fields, GGUFHeader):
        return fields.layers_without_kv(layers)
    indices = fields.get("full_attn_idxs")
    if (types := fields.get("layer_types")) is None:
        if not isinstance(indices, list):
            raise fields.error("layer_types", "is missing, and so is full_attn_idxs; the file is incomplete")
        types = ["full_attention" if index in indices else "conv" for index in range(layers)]
    return check_recurrent_layers(fields, "layer_types", types, layers, LAYER_TYPES)


# -- LFM3 --------------------------------------------------------------------------------------------------------------

LFM3_TYPES: Final = {"conv": True, "sliding_attention": False, "full_attention": False}
"""Type of a layer -> whether it has a convolution in place of attention."""

LFM3_PATTERN: Final = ("sliding_attention", "conv", "full_attention", "conv")
"""The types of layers in files that do not contain them; the first layer is a convolution."""

LFM3_ROPES: Final[dict[str, dict[str, Any]]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
"""The rotary embeddings of files without rope_parameters."""

LFM3_DEFAULTS: Final[dict[str, Any]] = {
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

LFM3_NORMS: Final = NormNames("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")


class Lfm3ConfigReader(LlamaConfigReader):
    """The reader of LFM3."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        sizes = self.read_sizes(fields)
        types = fields.get("layer_types")
        recurrent = check_recurrent_layers(fields, "layer_types", types, sizes.num_layers, LFM3_TYPES)
        return _declare(fields, sizes, recurrent, width=7)

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        has_gate, has_norms = (fields.flag(key, True) for key in ("use_attention_gate", "use_sandwich_norm"))
        return replace(
            sizes,
            attention_gate=AttentionGate("gate_proj", is_per_head=True) if has_gate else None,
            norms=LFM3_NORMS if has_norms else replace(LFM3_NORMS, after_attention=None, after_mlp=None),
            ropes=read_type_ropes(fields, sizes.sliding_windows, [sizes.head_dim] * sizes.num_layers, LFM3_ROPES),
        )


def _lfm3_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    """Read the windows, and set the types of layers that the file does not contain."""
    pattern = [LFM3_PATTERN[index % len(LFM3_PATTERN)] if index else "conv" for index in range(layers)]
    fields.set_defaults({"layer_types": pattern})
    window, types = fields.window(256), fields.get("layer_types")
    check_recurrent_layers(fields, "layer_types", types, layers, LFM3_TYPES)
    if window is None and "sliding_attention" in types:
        fields.get("sliding_window", REQUIRED)
    return [window if kind == "sliding_attention" else None for kind in types]


# -- names -------------------------------------------------------------------------------------------------------------

_WEIGHTS: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_RENAMED: Final = {
    "model.norm": "model.embedding_norm",
    **renamed_in_layers({f"mlp.{name}": f"feed_forward.{other}" for name, other in _WEIGHTS.items()}),
}
"""The names in files of the final norm and of the matrices of networks; see Architecture.stacked_names."""

_READER: Final = Lfm2ConfigReader(
    "lfm2",
    qkv_bias=False,
    qk_norm="heads",
    default_theta=1_000_000.0,
    eps_key="norm_eps",
    defaults={"tie_word_embeddings": True},
    gguf_defaults={"block_auto_adjust_ff_dim": False},
    has_recurrence=True,
)
_MOE_READER: Final = replace(
    _READER, name="lfm2_moe", experts=_read_experts, defaults={"norm_topk_prob": True, "tie_word_embeddings": True}
)

LFM2: Final = Architecture(
    name="lfm2",
    hf_readers={"Lfm2ForCausalLM": _READER, "Lfm2MoeForCausalLM": _MOE_READER},
    gguf_readers={"lfm2": _READER, "lfm2moe": _MOE_READER},
    gguf_names={
        **GGUF_NAMES,
        "model.norm": "token_embd_norm",
        **names_in_layers("conv", {name: f"shortconv.{name}" for name in ("conv", "in_proj", "out_proj")}),
        **names_in_layers("feed_forward", {"gate": "ffn_gate_inp", "expert_bias": "exp_probs_b.bias"}),
        **names_in_layers(
            "feed_forward.experts.{}", {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
        ),
    },
    stacked_names=_RENAMED
    | renamed_in_layers(
        {
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.o_proj": "self_attn.out_proj",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
        }
    ),
)

_LFM3_READER: Final = Lfm3ConfigReader(
    "lfm3", _lfm3_windows, qk_norm="heads", reads_rope=False, eps_key="norm_eps", defaults=LFM3_DEFAULTS
)

LFM3: Final = Architecture(
    name="lfm3",
    hf_readers={"Lfm3ForCausalLM": _LFM3_READER},
    stacked_names=_RENAMED | renamed_in_layers({"self_attn.gate_proj": "self_attn.g_proj"}),
)
