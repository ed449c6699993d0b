"""Muse Glimmer (Meta, 2026): `LlamaSizes` with a gate of attention.

The embedding and the heads of queries and keys have norms without weights. The weights of the norms of layers are
differences from 1. Layers with full attention, every fourth counted from the last one, have no rotary embedding. GGUF
files have weights of norms of heads, which contain the factor of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from chairlift.models.architectures.gemma import NORMS
from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec
from chairlift.models.declaration.matrix_spec import NormSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields, shortened
from chairlift.models.reading.gguf_header import POST_NORM_NAMES, GGUFHeader
from chairlift.models.reading.layer_fields import read_layer_windows, read_windows
from chairlift.models.reading.llama_sizes import AttentionGate, LlamaSizes

DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": 128,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "output_multiplier": 0.19611613513818404,
    "final_logit_softcapping": 20.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": 202_048,
}
"""The values of fields that a `config.json` does not contain, as in transformers' `MuseGlimmerTextConfig`."""

INTERVAL: Final = 4
WINDOW: Final = 2048


class MuseGlimmerConfigReader(LlamaConfigReader):
    """The reader of the text model."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        sizes = self.read_sizes(fields)
        config = sizes.declare()
        # GGUF files do not contain it: llama.cpp's muse-glimmer.cpp has the value of the published model.
        eps = fields.number("post_norm_eps", 1e-8, high=1.0)
        assert config.final_norm is not None, "decoders have a final norm"
        return replace(
            config,
            layers=tuple(_with_eps_after(layer, eps) for layer in config.layers),
            embedding_norm=NormSpec("rms_norm", None, sizes.hidden_size, sizes.norm_eps),
            final_norm=replace(config.final_norm, weight_offset=0.0),
        )

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = replace(
            super().read_sizes(fields),
            attention_gate=AttentionGate("gate_proj"),
            logits_multiplier=fields.number("output_multiplier"),
            logits_soft_cap=fields.number("final_logit_softcapping"),
        )
        if isinstance(fields, GGUFHeader):
            return replace(sizes.with_layer_ropes(sizes.rope, None), qk_norm="heads")
        return replace(
            sizes,
            norm_weight_offset=1.0,
            qk_norm="plain_heads",
            attention_scale=fields.number("qk_scale_factor", 3.87) * sizes.head_dim**-0.5,
            ropes=_read_ropes(fields, sizes),
        )

    def _activation(self, fields: ConfigFields) -> str:
        return fields.choice("hidden_activation", ("silu",), "silu")


def _with_eps_after(layer: LayerSpec, eps: float) -> LayerSpec:
    """Return the layer with another epsilon of the norms after branches."""

    def changed(norms: BranchNorms) -> BranchNorms:
        assert norms.after is not None, "each branch has a norm behind it"
        return replace(norms, after=replace(norms.after, eps=eps))

    attention, network = changed(layer.attention_norms), changed(layer.feed_forward_norms)
    return replace(layer, attention_norms=attention, feed_forward_norms=network)


def _is_full(index: int, layers: int) -> bool:
    """Whether a layer has full attention and no rotary embedding, in files that do not contain it."""
    return (layers - 1 - index) % INTERVAL == 0


def _windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    if isinstance(fields, GGUFHeader):
        return read_windows(fields, layers, INTERVAL)
    window, types = fields.window(WINDOW), fields.get("layer_types")
    if types is None:
        types = ["full_attention" if _is_full(index, layers) else "sliding_attention" for index in range(layers)]
    return read_layer_windows(fields, types, layers, window)


def _read_ropes(fields: ConfigFields, sizes: LlamaSizes) -> Sequence[RopeConfig | None]:
    """Read which layers have a rotary embedding. transformers ignores their bases in `layer_rope_theta`, unless it is
    0."""
    theta, layers = sizes.rope.theta, sizes.num_layers
    thetas = fields.get("layer_rope_theta", [0 if _is_full(index, layers) else theta for index in range(layers)])
    if not isinstance(thetas, list) or len(thetas) != layers or any(each not in (0, theta) for each in thetas):
        raise fields.error(
            "layer_rope_theta",
            f"must hold 0 or rope_theta ({theta:g}) for each of {layers} layers: {shortened(thetas)}",
        )
    return [sizes.rope if each else None for each in thetas]


_READER: Final = MuseGlimmerConfigReader("muse_glimmer", _windows, norms=NORMS, defaults=DEFAULTS)


MUSE_GLIMMER: Final = Architecture(
    name="muse_glimmer",
    hf_readers={"MuseGlimmerForCausalLM": _READER},
    gguf_readers={"muse-glimmer": _READER},
    gguf_names=POST_NORM_NAMES,
    gguf_interleaved=frozenset(("muse-glimmer",)),
)
