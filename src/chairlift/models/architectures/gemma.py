"""Gemma, Gemma 2 and Gemma 3 (Gemma Team, 2024 and 2025).

`LlamaSizes` with norms whose weights are differences from 1, a gate with GELU, and an embedding that is multiplied by
the root of its width. Gemma 2 adds norms after each branch, soft caps, and a window in every other layer; Gemma 3 has
norms of query and key heads, and five layers with a window and a separate rotary base to one with neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields
from chairlift.models.reading.gguf_header import POST_NORM_NAMES, GGUFHeader
from chairlift.models.reading.layer_fields import read_windows
from chairlift.models.reading.llama_sizes import LlamaSizes, NormNames
from chairlift.models.reading.rope_fields import read_layer_ropes

NORMS: Final = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
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

LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}
"""The models whose attention scale is not derived from the head size, which GGUF files do not contain."""


class GemmaConfigReader(LlamaConfigReader):
    """The reader of Gemma 1 to 3. The norms of GGUF files have complete weights."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        offset = 0.0 if isinstance(fields, GGUFHeader) else 1.0
        sizes = replace(sizes, norm_weight_offset=offset, embedding_multiplier=math.sqrt(sizes.hidden_size))
        if self.name == "gemma":
            return sizes
        sizes = replace(
            sizes,
            attention_scale=self._read_scale(fields, sizes),
            logits_soft_cap=read_soft_cap(fields, "final_logit_softcapping", 30.0 if self.name == "gemma2" else None),
        )
        if self.name == "gemma2":
            return replace(sizes, attention_soft_cap=read_soft_cap(fields, "attn_logit_softcapping", 50.0))
        fields.allow_only("attn_logit_softcapping", None, "the reference implementation of Gemma 3 ignores it")
        local_theta = fields.number("rope_local_base_freq", 10_000.0)
        return sizes.with_layer_ropes(*read_layer_ropes(fields, local_theta, 1_000_000.0))

    def _read_scale(self, fields: ConfigFields, sizes: LlamaSizes) -> float | None:
        if not isinstance(fields, GGUFHeader):
            return float(fields.number("query_pre_attn_scalar") ** -0.5)
        if sizes.num_layers != LAYERS_OF_27B[self.name]:
            return None
        return float((sizes.hidden_size / sizes.num_heads) ** -0.5)

    def _activation(self, fields: ConfigFields) -> str:
        if self.name == "gemma":
            fields.choice("hidden_act", ("gelu", "gelu_pytorch_tanh"), "gelu")  # Both are the approximation by tanh.
        fields.ignore("hidden_act")  # Gemma 2 and 3 use hidden_activation, and before transformers 5 so did Gemma 1.
        fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        return "gelu_tanh"


def _windows(fields: ConfigFields, layers: int, pattern: int, gguf_default: int | None = None) -> Sequence[int | None]:
    default = gguf_default if gguf_default is not None and isinstance(fields, GGUFHeader) else REQUIRED
    return read_windows(fields, layers, fields.integer("_sliding_window_pattern", pattern), default)


READER1: Final = GemmaConfigReader(
    "gemma", defaults={"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
)
READER2: Final = GemmaConfigReader(
    "gemma2",
    partial(_windows, pattern=2),
    norms=NORMS,
    defaults=DEFAULTS | {"max_position_embeddings": 8192, "vocab_size": 256_000},
    gguf_defaults={"sliding_window": 4096},
)
READER3: Final = GemmaConfigReader(
    "gemma3",
    partial(_windows, pattern=6, gguf_default=0),
    norms=NORMS,
    qk_norm="heads",
    reads_rope=False,
    defaults=DEFAULTS | {"max_position_embeddings": 131_072, "vocab_size": 262_208},
)


def read_soft_cap(fields: ConfigFields, key: str, default: float | None) -> float | None:
    """Read a soft cap, or return None if the file sets it to null."""
    default = None if fields.is_null(key) else default
    return None if fields.get(key, default) is None else fields.number(key, default)


GEMMA: Final = Architecture(
    name="gemma",
    hf_readers={"GemmaForCausalLM": READER1},
    gguf_readers={"gemma": READER1},
)
GEMMA2: Final = Architecture(
    name="gemma2",
    hf_readers={"Gemma2ForCausalLM": READER2},
    gguf_readers={"gemma2": READER2},
    gguf_names=POST_NORM_NAMES,
)
GEMMA3: Final = Architecture(
    name="gemma3",
    hf_readers={"Gemma3ForCausalLM": READER3},
    gguf_readers={"gemma3": READER3},
    gguf_names=POST_NORM_NAMES,
)
