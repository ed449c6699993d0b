"""Mixtral (Jiang et al., 2024), Qwen3-MoE (Yang et al., 2025) and OLMoE (Muennighoff et al., 2024): Llama with experts.

Mixtral is Mistral with experts in every layer; its GGUF files are of the architecture llama. Qwen3-MoE is Qwen3 with
experts in all layers, or in some of them. OLMoE has them in every layer, and norms of query and key across heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, no_windows, read_uniform_window, uniform_windows
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture, GGUFHeader
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import read_dense_layers, read_experts, read_softmax
from chairlift.models.reading.gguf_sizes import GGUF_NAMES, read_gguf_sizes
from chairlift.models.reading.llama_sizes import ExpertNames, ExpertSizes, LlamaSizes

MIXTRAL_NAMES: Final = ExpertNames(
    router="block_sparse_moe.gate",
    up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)

# -- config.json -----------------------------------------------------------------------------------------------------


def _read_mixtral(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    return read_experts(fields, sizes.intermediate_size, "chosen", MIXTRAL_NAMES)


def _read_qwen3(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    experts = read_experts(fields, fields.integer("moe_intermediate_size"), read_softmax(fields))
    return replace(experts, dense_layers=read_dense_layers(fields, sizes.num_layers))


def _read_olmoe(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    fields.allow_only("clip_qkv", None, "query, key and value are not clipped")
    return read_experts(fields, sizes.intermediate_size, read_softmax(fields))


def _qwen3_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    fields.ignore("max_window_layers")  # transformers ignores it in this architecture.
    if not fields.flag("use_sliding_window", False):
        fields.ignore("sliding_window")  # Has no effect.
        return ()
    return (fields.integer("sliding_window"),) * layers


# -- GGUF ------------------------------------------------------------------------------------------------------------


def read_qwen3_moe_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of Qwen3-MoE."""
    header.fields.integer("expert_feed_forward_length")  # Required, because it differs from feed_forward_length.
    sizes = read_gguf_sizes(header, expert_softmax="chosen")
    windows = read_uniform_window(header.fields, sizes.num_layers)
    return replace(sizes, sliding_windows=windows, qk_norm="heads").declare()


def read_olmoe_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of OLMoE."""
    sizes = read_gguf_sizes(header, expert_softmax="all")
    return replace(sizes, qk_norm="rows").declare()


MIXTRAL: Final = Architecture(
    name="mixtral",
    hf_readers={
        "MixtralForCausalLM": LlamaConfigReader(
            "mixtral", uniform_windows, qkv_bias=False, experts=_read_mixtral, default_theta=1e6
        )
    },
)
QWEN3_MOE: Final = Architecture(
    name="qwen3-moe",
    hf_readers={
        "Qwen3MoeForCausalLM": LlamaConfigReader("qwen3moe", _qwen3_windows, qk_norm="heads", experts=_read_qwen3)
    },
    gguf_readers={"qwen3moe": read_qwen3_moe_gguf},
    gguf_names=GGUF_NAMES,
)
OLMOE: Final = Architecture(
    name="olmoe",
    hf_readers={"OlmoeForCausalLM": LlamaConfigReader("olmoe", no_windows, qk_norm="rows", experts=_read_olmoe)},
    gguf_readers={"olmoe": read_olmoe_gguf},
    gguf_names=GGUF_NAMES,
)
