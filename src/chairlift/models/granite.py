"""Granite 3 (IBM, 2024): `LlamaSizes` with multipliers of the embedding, both branches, attention scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chairlift.models.architecture import Architecture, GGUFHeader
from chairlift.models.config_fields import ConfigFields
from chairlift.models.declaration import ModelConfig
from chairlift.models.gguf_sizes import GGUF_NAMES, read_gguf_sizes
from chairlift.models.llama import LlamaConfigReader, no_windows

_READER: Final = LlamaConfigReader("granite", no_windows, architecture="granite", reads_mlp_bias=True)


def read_granite(fields: ConfigFields) -> ModelConfig:
    """Read the `config.json` of a Granite model."""
    return replace(
        _READER.read_sizes(fields),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", 1.0),
    ).declare()


def read_granite_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of Granite."""
    fields, sizes = header.fields, read_gguf_sizes(header)
    return replace(
        sizes,
        architecture="granite",
        attention_scale=fields.number("attention.scale", sizes.head_dim**-0.5),
        embedding_multiplier=fields.number("embedding_scale", 1.0),
        residual_multiplier=fields.number("residual_scale", 1.0),
        logits_multiplier=1.0 / fields.number("logit_scale", 1.0),
    ).declare()


GRANITE: Final = Architecture(
    name="granite",
    hf_readers={"GraniteForCausalLM": read_granite},
    gguf_readers={"granite": read_granite_gguf},
    gguf_names=GGUF_NAMES,
    gguf_interleaved=frozenset(("granite",)),
)
