"""Gemma, Gemma 2 and Gemma 3 (Gemma Team, 2024 and 2025), without images.

`LlamaSizes` with norms whose weights are differences from 1, a gate with GELU, and an embedding that is multiplied by
the root of its width. Gemma 2 adds norms after each branch, soft caps, and a window in every other layer; Gemma 3 has
norms of query and key heads, and five layers with a window and a rotary base of their own to one with neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from chairlift.models.architectures.llama import LlamaConfigReader, no_windows
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture, GGUFHeader, HFReader
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_sizes import GGUF_NAMES, read_gguf_sizes, read_gguf_windows
from chairlift.models.reading.layer_fields import read_layer_windows, read_text_model, repeat_windows
from chairlift.models.reading.llama_sizes import LlamaSizes, NormNames
from chairlift.models.reading.rope_fields import read_layer_ropes

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

DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""The values of fields that files of Gemma do not contain."""

PATTERN: Final = {"gemma2": 2, "gemma3": 6}
"""In files that do not contain it: every n-th layer has no window."""

LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}
"""The models whose attention scale is not derived from the head size, which GGUF files do not contain."""

# -- config.json -----------------------------------------------------------------------------------------------------


class GemmaConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of Gemma 1 to 3 without images. The defaults are those of transformers."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        fields.allow_only("use_bidirectional_attention", False, "attention must be causal")
        sizes = super().read_sizes(fields)
        sizes = replace(sizes, norm_weight_offset=1.0, embedding_multiplier=math.sqrt(sizes.hidden_size))
        if self.name == "gemma":
            return sizes
        sizes = replace(
            sizes,
            attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
            logits_soft_cap=read_soft_cap(fields, "final_logit_softcapping", 30.0 if self.name == "gemma2" else None),
        )
        if self.name == "gemma2":
            return replace(sizes, attention_soft_cap=read_soft_cap(fields, "attn_logit_softcapping", 50.0))
        fields.allow_only("attn_logit_softcapping", None, "the reference implementation of Gemma 3 ignores it")
        local_theta = fields.number("rope_local_base_freq", LOCAL_THETA)
        return sizes.with_layer_ropes(*read_layer_ropes(fields, local_theta, GLOBAL_THETA))

    def _activation(self, fields: ConfigFields) -> str:
        if self.name == "gemma":
            fields.choice("hidden_act", ("gelu", "gelu_pytorch_tanh"), "gelu")  # Both are the approximation by tanh.
        fields.ignore("hidden_act")  # Gemma 2 and 3 use hidden_activation, and before transformers 5 so did Gemma 1.
        fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        return "gelu_tanh"

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        return RopeConfig() if self.name == "gemma3" else super()._rope(fields)  # Each layer of Gemma 3 has its own.


def _windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    window = fields.integer("sliding_window")
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern"))
    if (types := fields.get("layer_types")) is None:
        return repeat_windows(layers, window, pattern)
    return read_layer_windows(fields, types, layers, window)


READER1: Final = GemmaConfigReader(
    "gemma", no_windows, defaults={"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
)
READER2: Final = GemmaConfigReader(
    "gemma2",
    _windows,
    norms=NORMS,
    defaults=DEFAULTS | {"max_position_embeddings": 8192, "_sliding_window_pattern": 2, "vocab_size": 256_000},
)
READER3: Final = GemmaConfigReader(
    "gemma3",
    _windows,
    norms=NORMS,
    qk_norm="heads",
    defaults=DEFAULTS | {"max_position_embeddings": 131_072, "_sliding_window_pattern": 6, "vocab_size": 262_208},
)


def read_with_images(fields: ConfigFields, read: HFReader) -> ModelConfig:
    """Read the text model in the `config.json` of a model with images (`Gemma3ForConditionalGeneration`)."""
    fields.allow_only("tie_word_embeddings", True, "the LM head must be the embedding")
    return read_text_model(fields, read)


def read_soft_cap(fields: ConfigFields, key: str, default: float | None) -> float | None:
    """Read a soft cap, or return None if the file sets it to null."""
    default = None if fields.is_null(key) else default
    return None if fields.get(key, default) is None else fields.number(key, default)


# -- GGUF ------------------------------------------------------------------------------------------------------------


def read_gemma_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of Gemma 1 to 3, whose norms have complete weights."""
    fields, name = header.fields, header.name
    sizes = read_gguf_sizes(header)
    sizes = replace(sizes, activation="gelu_tanh", embedding_multiplier=math.sqrt(sizes.hidden_size))
    if name == "gemma":
        return sizes.declare()
    window = fields.integer("attention.sliding_window", 4096 if name == "gemma2" else 0, low=0)
    windows = read_gguf_windows(fields, sizes.num_layers, window or None, PATTERN[name])
    local_theta = sizes.rope.theta if name == "gemma2" else LOCAL_THETA
    local = RopeConfig(theta=fields.number("rope.freq_base_swa", local_theta))
    scale = None
    if sizes.num_layers == LAYERS_OF_27B[name]:
        scale = (sizes.hidden_size / sizes.num_heads) ** -0.5
    sizes = replace(
        sizes,
        norms=NORMS,
        sliding_windows=windows,
        attention_scale=scale,
        attention_soft_cap=read_soft_cap(fields, "attn_logit_softcapping", 50.0 if name == "gemma2" else None),
        logits_soft_cap=read_soft_cap(fields, "final_logit_softcapping", 30.0 if name == "gemma2" else None),
        qk_norm="heads" if name == "gemma3" else None,
    )
    return sizes.with_layer_ropes(local, sizes.rope).declare()


# -- names -----------------------------------------------------------------------------------------------------------

_GGUF_NAMES: Final = {
    **GGUF_NAMES,
    "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
    "model.layers.{}.pre_feedforward_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
}

GEMMA: Final = Architecture(
    name="gemma",
    hf_readers={"GemmaForCausalLM": READER1},
    gguf_readers={"gemma": read_gemma_gguf},
    gguf_names=GGUF_NAMES,
)
GEMMA2: Final = Architecture(
    name="gemma2",
    hf_readers={"Gemma2ForCausalLM": READER2},
    gguf_readers={"gemma2": read_gemma_gguf},
    gguf_names=_GGUF_NAMES,
)
GEMMA3: Final = Architecture(
    name="gemma3",
    hf_readers={
        "Gemma3ForCausalLM": READER3,
        "Gemma3ForConditionalGeneration": partial(read_with_images, read=READER3),
    },
    gguf_readers={"gemma3": read_gemma_gguf},
    gguf_names=_GGUF_NAMES,
    other_prefixes=(("model.", "model.language_model."), ("model.", "language_model.model.")),
    unread_prefixes=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
