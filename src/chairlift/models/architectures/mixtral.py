"""Mixtral (Jiang et al., 2024): Mistral with experts in every layer. Its GGUF files are of the architecture llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, uniform_windows
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import read_experts
from chairlift.models.reading.llama_sizes import ExpertNames, LlamaSizes

NAMES: Final = ExpertNames(
    router="block_sparse_moe.gate",
    up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)


class MixtralConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of Mixtral."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        return replace(sizes, experts=read_experts(fields, sizes.intermediate_size, "chosen", NAMES))


MIXTRAL: Final = Architecture(
    name="mixtral",
    hf_readers={
        "MixtralForCausalLM": MixtralConfigReader(
            "mixtral", uniform_windows, qkv_bias=False, architecture="mixtral", default_theta=1e6
        )
    },
)
