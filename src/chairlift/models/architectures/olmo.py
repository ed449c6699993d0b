"""OLMo 2, OLMo 3 and OLMo Hybrid (Ai2, 2024 to 2026): `LlamaSizes` with norms after each branch, and norms of query and
key across heads; and EXAONE 4 (LG AI Research, 2025), which is OLMo 2 with a norm of each query and key head.

OLMo 3 adds windows in three of four layers, whose rotary embedding is not scaled. OLMo Hybrid has the gated delta rule
in three of four layers, whose norms are before each branch, and no positions. EXAONE 4 with 32 billion parameters has
windows in three of four layers, and no rotary embedding in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.matrix_spec import NormSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.declaration.recurrence_spec import RecurrenceSpec
from chairlift.models.reading.architecture import Architecture, renamed_in_layers
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.delta_sizes import DeltaSizes, read_delta_sizes
from chairlift.models.reading.gguf_header import POST_NORM_NAMES
from chairlift.models.reading.layer_fields import DELTA_LAYERS, check_recurrent_layers, read_windows
from chairlift.models.reading.llama_sizes import LlamaSizes, NormNames

NORMS: Final = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
DELTA_NORM_EPS: Final = 1e-5
"""The epsilon of the norm of heads after the gated delta rule, which no field has."""


class OlmoHybridConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of OLMo Hybrid."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        sizes = self.read_sizes(fields)
        config, others = sizes.declare(), replace(sizes, norms=NormNames()).declare()
        types = fields.get("layer_types", [*["linear_attention"] * 3, "full_attention"] * (sizes.num_layers // 4))
        recurrent = check_recurrent_layers(fields, "layer_types", types, sizes.num_layers, DELTA_LAYERS)
        beta_scale = 2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0
        delta = read_delta_sizes(fields, sizes, beta_scale=beta_scale)
        others = others.with_recurrences(recurrent, partial(_declare_delta, delta, sizes.hidden_size))
        pairs = zip(config.layers, others.layers, strict=True)
        return replace(config, layers=tuple(pair[has_one] for pair, has_one in zip(pairs, recurrent, strict=True)))

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        rope = fields.mapping("rope_parameters")
        has_rope = rope is not None and rope.get("rope_theta") is not None
        return sizes if has_rope else sizes.without_rope()


def _declare_delta(delta: DeltaSizes, hidden_size: int, index: int) -> RecurrenceSpec:
    prefix, keys, values = f"model.layers.{index}.linear_attn", delta.num_keys, delta.out_features
    widths = keys, keys, values, values, delta.num_heads, delta.num_heads
    inputs = dict(zip("qkvgba", widths, strict=True))
    return delta.declare(
        prefix,
        hidden_size,
        NormSpec("rms_norm", f"{prefix}.o_norm", delta.value_dim, DELTA_NORM_EPS),
        [(f"{name}_proj", size) for name, size in inputs.items()],
        "o_proj",
        convolutions=[f"{name}_conv1d" for name in "qkv"],
    )


def exaone_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    """Return the window of each layer; empty without windows, where every layer has a rotary embedding."""
    windows = read_windows(fields, layers, pattern=4, default=4096)
    return () if fields.window(4096) is None else windows


_EXAONE4: Final = LlamaConfigReader(
    "exaone4", exaone_windows, qkv_bias=False, norms=NORMS, qk_norm="heads", rotates_windows_only=True
)
_OLMO3: Final = LlamaConfigReader(
    "olmo3",
    partial(read_windows, pattern=4, default=4096),
    norms=NORMS,
    qk_norm="rows",
    layer_thetas=(None, 500_000.0),
)
"""Every fourth layer has no window. In GGUF files OLMo 2 is OLMo 3 without windows."""

OLMO: Final = Architecture(
    name="olmo",
    hf_readers={
        "Olmo2ForCausalLM": LlamaConfigReader("olmo2", norms=NORMS, qk_norm="rows"),
        "Olmo3ForCausalLM": _OLMO3,
        "OlmoHybridForCausalLM": OlmoHybridConfigReader("olmo_hybrid", norms=NORMS, qk_norm="rows"),
    },
    stacked_names=renamed_in_layers(
        {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    ),
    gguf_readers={"olmo2": _OLMO3},
    gguf_names=POST_NORM_NAMES,
)
EXAONE4: Final = Architecture(
    name="exaone4",
    hf_readers={"Exaone4ForCausalLM": _EXAONE4},
    gguf_readers={"exaone4": _EXAONE4},
    gguf_names=POST_NORM_NAMES,
)
