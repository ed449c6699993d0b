"""Gemma 2 and Gemma 3 (Gemma Team, 2024 and 2025), without images.

`LlamaSizes` with norms before and after each branch, whose weights are differences from 1, a gate with GELU, and an
embedding that is multiplied by the root of its width. Gemma 2 has soft caps and a window in every other layer; Gemma 3
has norms of query and key heads, and five layers with a window and a rotary base of their own to one with neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chairlift.models.declaration import ModelConfig, RopeConfig
from chairlift.models.reading.architecture import Architecture, GGUFHeader
from chairlift.models.reading.config_fields import ConfigFields, exact_quotient
from chairlift.models.reading.gguf_sizes import GGUF_NAMES, read_gguf_sizes, read_gguf_windows
from chairlift.models.reading.layer_fields import (
    MAX_LAYERS,
    read_head_dim,
    read_layer_windows,
    read_text_model,
    repeat_windows,
)
from chairlift.models.reading.llama_sizes import LlamaSizes, NormNames
from chairlift.models.reading.rope_fields import read_layer_ropes, read_rope

NORMS: Final = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
LOCAL_THETA: Final = 10_000.0
"""Base of the rotary embedding of Gemma 3's layers with a window, in files that do not contain it."""

GLOBAL_THETA: Final = 1_000_000.0
"""Base of the rotary embedding of Gemma 3's other layers, in files that do not contain it."""

PATTERN: Final = {"gemma2": 2, "gemma3": 6}
"""In files that do not contain it: every n-th layer has no window."""

LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}
"""The models whose attention scale is not derived from the head size, which GGUF files do not contain."""

IMAGE_FIELDS: Final = (
    "vision_config",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "mm_tokens_per_image",
)

# -- config.json -----------------------------------------------------------------------------------------------------


def read_gemma2(fields: ConfigFields) -> ModelConfig:
    """Read the `config.json` of a Gemma 2 model."""
    sizes = _read_sizes(fields, "gemma2")
    window = fields.integer("sliding_window", 4096)
    return replace(
        sizes,
        rope=read_rope(fields),
        sliding_windows=_windows(fields, sizes, window),
        attention_soft_cap=read_soft_cap(fields, "attn_logit_softcapping", 50.0),
        logits_soft_cap=read_soft_cap(fields, "final_logit_softcapping", 30.0),
    ).declare()


def read_gemma3(fields: ConfigFields) -> ModelConfig:
    """Read the `config.json` of a Gemma 3 model without images (`Gemma3ForCausalLM`)."""
    sizes = _read_sizes(fields, "gemma3")
    fields.allow_only("use_bidirectional_attention", False, "attention must be causal")
    fields.allow_only("attn_logit_softcapping", None, "the reference implementation of Gemma 3 ignores it")
    windows = _windows(fields, sizes, fields.integer("sliding_window", 4096))
    local_theta = fields.number("rope_local_base_freq", LOCAL_THETA)
    local, whole = read_layer_ropes(fields, local_theta, GLOBAL_THETA)
    return replace(
        sizes,
        ropes=[whole if window is None else local for window in windows],
        sliding_windows=windows,
        qk_norm="heads",
        logits_soft_cap=read_soft_cap(fields, "final_logit_softcapping", None),
    ).declare()


def read_gemma3_with_images(fields: ConfigFields) -> ModelConfig:
    """Read the text model in the `config.json` of a Gemma 3 model with images (`Gemma3ForConditionalGeneration`)."""
    fields.allow_only("tie_word_embeddings", True, "the LM head must be the embedding")
    return read_text_model(fields, IMAGE_FIELDS, read_gemma3)


def _read_sizes(fields: ConfigFields, name: str) -> LlamaSizes:
    """Read what both generations have in common. The defaults are those of transformers."""
    layers = fields.integer("num_hidden_layers", 26, high=MAX_LAYERS)
    heads = fields.integer("num_attention_heads", 8)
    kv_heads = fields.integer("num_key_value_heads", 4)
    exact_quotient(fields, "num_attention_heads", heads, "num_key_value_heads", kv_heads)
    hidden = fields.integer("hidden_size", 2304)
    bias = fields.flag("attention_bias", False)
    fields.get("hidden_act")  # Marks the field as read; the models use hidden_activation.
    fields.get("cache_implementation")
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    head_dim = (
        256
        if fields.get("head_dim") is None
        else read_head_dim(fields, "head_dim", "hidden_size", "num_attention_heads", heads)
    )
    return LlamaSizes(
        architecture=name,
        name=name,
        vocab_size=fields.integer("vocab_size", {"gemma2": 256_000, "gemma3": 262_208}[name]),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 9216),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings", {"gemma2": 8192, "gemma3": 131_072}[name]),
        norms=NORMS,
        norm_eps=fields.number("rms_norm_eps", 1e-6, high=1.0),
        norm_weight_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        activation="gelu_tanh",
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        embedding_multiplier=math.sqrt(hidden),
    )


def _windows(fields: ConfigFields, sizes: LlamaSizes, window: int) -> Sequence[int | None]:
    pattern = fields.integer("_sliding_window_pattern", PATTERN[sizes.name])
    pattern = fields.integer("sliding_window_pattern", pattern)
    types = fields.get("layer_types")
    if types is None:
        return repeat_windows(sizes.num_layers, window, pattern)
    return read_layer_windows(fields, types, sizes.num_layers, window)


def read_soft_cap(fields: ConfigFields, key: str, default: float | None) -> float | None:
    """Read a soft cap, or return None if the file sets it to null."""
    if fields.get(key) is None:
        return None if fields.contains(key) else default
    return fields.number(key)


# -- GGUF ------------------------------------------------------------------------------------------------------------


def read_gemma_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of Gemma 2 or Gemma 3, whose norms have complete weights."""
    fields, name = header.fields, header.name
    sizes = read_gguf_sizes(header)
    window = fields.integer("attention.sliding_window", 4096 if name == "gemma2" else 0, low=0)
    windows = read_gguf_windows(fields, sizes.num_layers, window or None, PATTERN[name])
    local_theta = sizes.rope.theta if name == "gemma2" else LOCAL_THETA
    local = RopeConfig(theta=fields.number("rope.freq_base_swa", local_theta))
    whole = sizes.rope
    scale = None
    if sizes.num_layers == LAYERS_OF_27B[name]:
        scale = (sizes.hidden_size / sizes.num_heads) ** -0.5
    return replace(
        sizes,
        architecture=name,
        norms=NORMS,
        ropes=[whole if each is None else local for each in windows],
        sliding_windows=windows,
        attention_scale=scale,
        attention_soft_cap=read_soft_cap(fields, "attn_logit_softcapping", 50.0 if name == "gemma2" else None),
        logits_soft_cap=read_soft_cap(fields, "final_logit_softcapping", 30.0 if name == "gemma2" else None),
        activation="gelu_tanh",
        qk_norm="heads" if name == "gemma3" else None,
        embedding_multiplier=math.sqrt(sizes.hidden_size),
    ).declare()


# -- names -----------------------------------------------------------------------------------------------------------

_GGUF_NAMES: Final = {
    **GGUF_NAMES,
    "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
    "model.layers.{}.pre_feedforward_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
}

GEMMA2: Final = Architecture(
    name="gemma2",
    hf_readers={"Gemma2ForCausalLM": read_gemma2},
    gguf_readers={"gemma2": read_gemma_gguf},
    gguf_names=_GGUF_NAMES,
)
GEMMA3: Final = Architecture(
    name="gemma3",
    hf_readers={"Gemma3ForCausalLM": read_gemma3, "Gemma3ForConditionalGeneration": read_gemma3_with_images},
    gguf_readers={"gemma3": read_gemma_gguf},
    gguf_names=_GGUF_NAMES,
    other_prefixes=(("model.", "model.language_model."), ("model.", "language_model.model.")),
    unread_prefixes=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
