"""Ministral 3 (Mistral AI, 2025): Mistral with queries that are scaled by their position."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, uniform_windows
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields
from chairlift.models.reading.gguf_header import GGUFHeader


class Ministral3ConfigReader(LlamaConfigReader):
    """The reader of Ministral 3 (`Ministral3ForCausalLM`).

    GGUF files of Mistral Small 3.1, whose queries are not scaled, have the same architecture.
    """

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        return with_query_scale(fields, super()._rope(fields))


def with_query_scale(fields: ConfigFields, rope: RopeConfig) -> RopeConfig:
    """Return a rotary embedding with the factor of queries that grows with their position."""
    is_gguf, key = isinstance(fields, GGUFHeader), "llama_4_scaling_beta"
    scaling = fields if is_gguf else fields.mapping("rope_parameters")
    if scaling is None:
        raise fields.error("rope_parameters", "is missing; the file is incomplete")
    scaling.ignore("max_position_embeddings")  # transformers ignores it.
    if scaling.get(key, 0 if is_gguf else REQUIRED) == 0:
        return rope
    beta = scaling.number(key)
    original = scaling.integer("original_max_position_embeddings")
    return replace(rope, query_scaling_beta=beta, original_max_position_embeddings=original)


READER: Final = Ministral3ConfigReader("ministral3", uniform_windows, qkv_bias=False)
MINISTRAL3: Final = Architecture(
    name="ministral3",
    hf_readers={"Ministral3ForCausalLM": READER},
    gguf_readers={"mistral3": READER},
    gguf_interleaved=frozenset(("mistral3",)),
)
