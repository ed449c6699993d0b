"""MiniCPM3 (OpenBMB, 2024): DeepSeek's latent attention without experts, with factors of the embedding, both branches
and logits, and the LongRoPE of Phi-3. The dimensions of a rotated pair are half the rotated part apart."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from chairlift.models.architectures.deepseek import DEEPSEEK_GGUF_NAMES, DEEPSEEK_STACKED_NAMES, DeepseekConfigReader
from chairlift.models.architectures.phi3 import read_longrope
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.llama_sizes import LlamaSizes

DEFAULTS: Final[dict[str, Any]] = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "rope_interleave": False}
"""GGUF files do not contain the factors, and llama.cpp has these constants (minicpm3.cpp)."""


class MiniCPM3ConfigReader(DeepseekConfigReader):
    """The reader of MiniCPM3."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        fields.ignore("head_dim")  # transformers replaces it.
        length = fields.integer("max_position_embeddings")
        fields.set_defaults({"original_max_position_embeddings": length})
        sizes = super().read_sizes(fields)
        width, root = sizes.hidden_size // sizes.num_heads, math.sqrt(sizes.num_layers)
        fields.set_defaults({"v_head_dim": width, "attention.value_length": width})
        fields.allow_only("rope_interleave", False, "transformers ignores it in this architecture")
        depth = root if fields.is_null("scale_depth") else fields.number("scale_depth")
        base = sizes.hidden_size if fields.is_null("dim_model_base") else fields.integer("dim_model_base")
        return replace(
            sizes,
            embedding_multiplier=fields.number("scale_emb"),
            residual_multiplier=depth / root,
            logits_multiplier=base / sizes.hidden_size,
        )

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        return read_longrope(fields)


_READER: Final = MiniCPM3ConfigReader(
    "minicpm3",
    experts=None,
    field_names={"head_dim": "qk_rope_head_dim"},
    defaults={**DEFAULTS, "q_lora_rank": 768, "tie_word_embeddings": True},
    gguf_defaults=DEFAULTS,
)

MINICPM3: Final = Architecture(
    name="minicpm3",
    hf_readers={"MiniCPM3ForCausalLM": _READER},
    gguf_readers={"minicpm3": _READER},
    gguf_names=DEEPSEEK_GGUF_NAMES,
    stacked_names=DEEPSEEK_STACKED_NAMES,
)
