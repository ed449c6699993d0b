"""Ministral 3 (Mistral AI, 2025), without images: Mistral with queries that are scaled by their position."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, uniform_windows
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields
from chairlift.models.reading.gguf_header import GGUF_NAMES, GGUFHeader
from chairlift.models.reading.layer_fields import read_text_model


class Ministral3ConfigReader(LlamaConfigReader):
    """The reader of Ministral 3 without images (`Ministral3ForCausalLM`).

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


TEXT_READERS: Final = {
    "ministral3": Ministral3ConfigReader("ministral3", uniform_windows, qkv_bias=False),
    "mistral": LlamaConfigReader("mistral", uniform_windows, qkv_bias=False),
}
"""`model_type` of the text model in a checkpoint with images -> its reader."""


def _read_text_config(fields: ConfigFields) -> ModelConfig:
    return TEXT_READERS[fields.choice("model_type", TEXT_READERS, "mistral")](fields)


def read_mistral3_with_images(fields: ConfigFields) -> ModelConfig:
    """Read the text model in the `config.json` of a model with images (`Mistral3ForConditionalGeneration`)."""
    read = read_text_model(fields, _read_text_config)
    return replace(read, tie_word_embeddings=fields.flag("tie_word_embeddings", read.tie_word_embeddings))


MINISTRAL3: Final = Architecture(
    name="ministral3",
    hf_readers={
        "Ministral3ForCausalLM": TEXT_READERS["ministral3"],
        "Mistral3ForConditionalGeneration": read_mistral3_with_images,
    },
    gguf_readers={"mistral3": TEXT_READERS["ministral3"]},
    gguf_names=GGUF_NAMES,
    gguf_interleaved=frozenset(("mistral3",)),
    other_prefixes=(
        ("model.", "model.language_model."),
        ("model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ),
    unread_prefixes=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
