"""OLMoE (Muennighoff et al., 2024): Llama with experts in every layer, and norms of query and key across heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, no_windows
from chairlift.models.declaration import ModelConfig
from chairlift.models.reading.architecture import Architecture, GGUFHeader
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import read_experts, read_softmax
from chairlift.models.reading.gguf_sizes import GGUF_NAMES, read_gguf_sizes
from chairlift.models.reading.llama_sizes import LlamaSizes


class OlmoeConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of OLMoE."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        fields.allow_only("clip_qkv", None, "query, key and value are not clipped")
        sizes = super().read_sizes(fields)
        experts = read_experts(fields, sizes.intermediate_size, read_softmax(fields))
        return replace(sizes, experts=experts, qk_norm="rows")


def read_olmoe_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of OLMoE."""
    sizes = read_gguf_sizes(header, expert_softmax="all")
    return replace(sizes, architecture="olmoe", qk_norm="rows").declare()


OLMOE: Final = Architecture(
    name="olmoe",
    hf_readers={"OlmoeForCausalLM": OlmoeConfigReader("olmoe", no_windows, architecture="olmoe")},
    gguf_readers={"olmoe": read_olmoe_gguf},
    gguf_names=GGUF_NAMES,
)
