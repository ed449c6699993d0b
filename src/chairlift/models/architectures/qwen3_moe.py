"""Qwen3-MoE (Yang et al., 2025): Qwen3 with experts in all layers, or in some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, read_uniform_window
from chairlift.models.declaration import ModelConfig
from chairlift.models.reading.architecture import Architecture, GGUFHeader
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import read_dense_layers, read_experts, read_softmax
from chairlift.models.reading.gguf_sizes import GGUF_NAMES, read_gguf_sizes
from chairlift.models.reading.llama_sizes import LlamaSizes


class Qwen3MoeConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of Qwen3-MoE."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        experts = read_experts(fields, fields.integer("moe_intermediate_size"), read_softmax(fields))
        return replace(sizes, experts=replace(experts, dense_layers=read_dense_layers(fields, sizes.num_layers)))


def _windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    fields.get("max_window_layers")  # Marks the field as read; transformers ignores it in this architecture.
    if not fields.flag("use_sliding_window", False):
        fields.get("sliding_window")  # Has no effect.
        return ()
    return (fields.integer("sliding_window"),) * layers


def read_qwen3_moe_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of Qwen3-MoE."""
    header.fields.integer("expert_feed_forward_length")  # Required, because it differs from feed_forward_length.
    sizes = read_gguf_sizes(header, expert_softmax="chosen")
    windows = read_uniform_window(header.fields, sizes.num_layers)
    return replace(sizes, architecture="qwen3-moe", sliding_windows=windows, qk_norm="heads").declare()


QWEN3_MOE: Final = Architecture(
    name="qwen3-moe",
    hf_readers={
        "Qwen3MoeForCausalLM": Qwen3MoeConfigReader("qwen3moe", _windows, qk_norm="heads", architecture="qwen3-moe")
    },
    gguf_readers={"qwen3moe": read_qwen3_moe_gguf},
    gguf_names=GGUF_NAMES,
)
