"""OLMo 2, OLMo 3 and OLMo Hybrid (Ai2, 2024 to 2026): `LlamaSizes` with norms after each branch, and norms of query and
key across heads.

OLMo 3 adds windows in three of four layers, whose rotary embedding is not scaled. OLMo Hybrid has the gated delta rule
in three of four layers, whose norms are before each branch, and no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, no_windows
from chairlift.models.declaration import (
    RECURRENCE,
    BranchNorms,
    ConvolutionSpec,
    GatedDeltaSpec,
    LayerSpec,
    MatrixSpec,
    ModelConfig,
    NormSpec,
    RecurrenceSpec,
    RopeConfig,
)
from chairlift.models.reading.architecture import Architecture, GGUFHeader
from chairlift.models.reading.config_fields import ConfigFields, exact_quotient
from chairlift.models.reading.gguf_sizes import GGUF_NAMES, read_gguf_sizes, read_gguf_windows
from chairlift.models.reading.layer_fields import check_recurrent_layers, read_layer_windows, repeat_windows
from chairlift.models.reading.llama_sizes import LlamaSizes, NormNames
from chairlift.models.reading.rope_fields import read_layer_ropes

NORMS: Final = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
PATTERN: Final = 4
"""In files that do not contain it: every n-th layer of OLMo 3 has no window."""

LAYER_TYPES: Final = {"linear_attention": True, "full_attention": False}
"""Type of a layer of OLMo Hybrid -> whether it has the gated delta rule in place of attention."""

INITIALIZATION_FIELDS: Final = (
    "linear_a_log_max",
    "linear_a_log_min",
    "linear_dt_init_floor",
    "linear_dt_max",
    "linear_dt_min",
)
MAX_WIDTH: Final = 16
"""The largest width of a convolution."""

DELTA_NORM_EPS: Final = 1e-5
"""The epsilon of the norm of heads after the gated delta rule, which no field has."""

THETA: Final = 500_000.0
"""Base of the rotary embedding of OLMo 3, in files that do not contain it."""


class OlmoConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of OLMo 2."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        return replace(super().read_sizes(fields), norms=NORMS, qk_norm="rows")


class Olmo3ConfigReader(OlmoConfigReader):
    """The reader of the `config.json` of OLMo 3."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        local, whole = read_layer_ropes(fields, fields.number("rope_theta", THETA), THETA)
        return replace(sizes, ropes=[whole if window is None else local for window in sizes.sliding_windows])

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        return RopeConfig()  # Each layer has its own.


def _windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    window = fields.integer("sliding_window", 4096)
    types = fields.get("layer_types")
    return (
        repeat_windows(layers, window, PATTERN) if types is None else read_layer_windows(fields, types, layers, window)
    )


class OlmoHybridConfigReader(OlmoConfigReader):
    """The reader of the `config.json` of OLMo Hybrid."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        for key in INITIALIZATION_FIELDS:
            fields.get(key)
        sizes = self.read_sizes(fields)
        config, others = sizes.declare(), replace(sizes, norms=NormNames()).declare()
        types = fields.get("layer_types", [*["linear_attention"] * 3, "full_attention"] * (sizes.num_layers // 4))
        recurrent = check_recurrent_layers(fields, "layer_types", types, sizes.num_layers, LAYER_TYPES)
        return replace(
            config,
            layers=tuple(
                _with_delta(fields, sizes, f"model.layers.{index}.linear_attn", others.layers[index])
                if is_recurrent
                else config.layers[index]
                for index, is_recurrent in enumerate(recurrent)
            ),
        )

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        rope = fields.mapping("rope_parameters")
        has_rope = rope is not None and rope.get("rope_theta") is not None
        return sizes if has_rope else replace(sizes, ropes=(None,) * sizes.num_layers)


def _with_delta(fields: ConfigFields, sizes: LlamaSizes, prefix: str, layer: LayerSpec) -> LayerSpec:
    """Declare a layer with the gated delta rule in place of attention, whose parameters begin with `prefix`."""
    key_heads = fields.integer("linear_num_key_heads", sizes.num_heads)
    heads = fields.integer("linear_num_value_heads", sizes.num_heads)
    exact_quotient(fields, "linear_num_value_heads", heads, "linear_num_key_heads", key_heads)
    key_dim = fields.integer("linear_key_head_dim", int(0.75 * sizes.hidden_size / key_heads))
    value_dim = fields.integer("linear_value_head_dim", 2 * key_dim)
    keys, values = key_heads * key_dim, heads * value_dim
    widths = {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values, "b_proj": heads, "a_proj": heads}
    convolutions = tuple((f"{prefix}.{name}_conv1d", widths[f"{name}_proj"]) for name in "qkv")
    rule = GatedDeltaSpec(
        key_heads,
        heads,
        key_dim,
        value_dim,
        f"{prefix}.A_log",
        f"{prefix}.dt_bias",
        NormSpec("rms_norm", f"{prefix}.o_norm", value_dim, DELTA_NORM_EPS),
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
    )
    parts = tuple((f"{prefix}.{name}", size) for name, size in widths.items())
    spec = RecurrenceSpec(
        input=MatrixSpec(RECURRENCE, "delta_in", parts, sizes.hidden_size),
        output=MatrixSpec(RECURRENCE, "delta_out", ((f"{prefix}.o_proj", sizes.hidden_size),), values),
        convolution=ConvolutionSpec(
            f"{prefix}.conv1d",
            2 * keys + values,
            fields.integer("linear_conv_kernel_dim", 4, low=2, high=MAX_WIDTH),
            parts=convolutions,
        ),
        gated_delta=rule,
    )
    norms = layer.attention_norms
    return replace(layer, attention=None, attention_norms=BranchNorms(), recurrence=spec, recurrence_norms=norms)


def read_olmo_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of OLMo 2, or of OLMo 3, which has windows."""
    fields, sizes = header.fields, read_gguf_sizes(header)
    window = fields.integer("attention.sliding_window", 0, low=0)
    windows = read_gguf_windows(fields, sizes.num_layers, window or None, PATTERN)
    local = RopeConfig(theta=fields.number("rope.freq_base_swa", sizes.rope.theta))
    ropes = [sizes.rope if each is None else local for each in windows]
    return replace(
        sizes, architecture="olmo", norms=NORMS, ropes=ropes, sliding_windows=windows, qk_norm="rows"
    ).declare()


OLMO: Final = Architecture(
    name="olmo",
    hf_readers={
        "Olmo2ForCausalLM": OlmoConfigReader("olmo2", no_windows, architecture="olmo"),
        "Olmo3ForCausalLM": Olmo3ConfigReader("olmo3", _windows, architecture="olmo"),
        "OlmoHybridForCausalLM": OlmoHybridConfigReader("olmo_hybrid", no_windows, architecture="olmo"),
    },
    stacked_names={
        "model.layers.{}.input_layernorm": "model.layers.{}.attention_layer_norm",
        "model.layers.{}.post_attention_layernorm": "model.layers.{}.feedforward_layer_norm",
    },
    gguf_readers={"olmo2": read_olmo_gguf},
    gguf_names={
        **GGUF_NAMES,
        "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
        "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
    },
)
