"""Command R, R7B and A, and Aya (Cohere, 2024 and 2025): Llama with parallel branches after one LayerNorm.

The two dimensions of a rotated pair are in adjacent rows. Command R7B and A (`Cohere2ForCausalLM`) have windows in
three of four layers, and no rotary embedding in the others. Command R+, with norms of query and key heads, is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, no_windows
from chairlift.models.reading.architecture import PAIRED_QUERIES_AND_KEYS, Architecture
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_header import GGUF_NAMES
from chairlift.models.reading.layer_fields import read_windows
from chairlift.models.reading.llama_sizes import LlamaSizes, NormNames

FIXED: Final = {
    "use_qk_norm": False,
    "use_parallel_block": True,
    "use_gated_activation": True,
    "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
}
"""The only supported values of these fields."""

IGNORED: Final = ("layer_switch", "use_embedding_sharing", "use_parallel_embedding")
"""The fields of published files that transformers ignores."""


class CohereConfigReader(LlamaConfigReader):
    """The reader of one model type."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        for key, value in FIXED.items():
            fields.allow_only(key, value, f"the only supported value is {value!r}")
        fields.ignore(*IGNORED)
        return replace(
            super().read_sizes(fields),
            norms=NormNames(before_mlp="input_layernorm"),
            norm_kind="layer_norm",
            is_parallel=True,
            logits_multiplier=fields.number("logit_scale", 0.0625),
        )


def _windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    if fields.window(4096) is None:
        raise fields.error("sliding_window", "is missing or 0; layers with a rotary embedding must have a window")
    return read_windows(fields, layers, pattern=4, default=4096)


_READER: Final = CohereConfigReader(
    "cohere",
    no_windows,
    rotates_windows_only=True,
    eps_key="layer_norm_eps",
    default_theta=500_000.0,
    defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": True},
)

_READER2: Final = replace(_READER, name="cohere2", windows=_windows, default_theta=10_000.0)

COHERE: Final = Architecture(
    name="cohere",
    hf_readers={"CohereForCausalLM": _READER, "Cohere2ForCausalLM": _READER2},
    gguf_readers={"command-r": _READER, "cohere2": _READER2},
    gguf_names=GGUF_NAMES,
    gguf_interleaved=frozenset(("command-r", "cohere2")),
    stacked_names=PAIRED_QUERIES_AND_KEYS,
)
