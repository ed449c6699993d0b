"""EXAONE 4 (LG AI Research, 2025): OLMo 2 with a norm of each query and key head.

The model of 32 billion parameters has windows in three of four layers, and no rotary embedding in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.architectures.olmo import NORMS, OLMO, PATTERN
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture, GGUFHeader
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_sizes import read_gguf_sizes, read_gguf_windows
from chairlift.models.reading.layer_fields import read_layer_windows, repeat_windows
from chairlift.models.reading.llama_sizes import LlamaSizes


class Exaone4ConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of EXAONE 4."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        return sizes.with_layer_ropes(sizes.rope, None)


def read_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    """Return the window of each layer; empty without windows, where every layer has a rotary embedding."""
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)
    if (types := fields.get("layer_types")) is None:
        windows = repeat_windows(layers, window, fields.integer("sliding_window_pattern", PATTERN))
    else:
        windows = read_layer_windows(fields, types, layers, window)
        fields.ignore("sliding_window_pattern")  # No effect beside layer_types.
    return () if window is None else windows


def read_exaone4_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of EXAONE 4."""
    fields, sizes = header.fields, read_gguf_sizes(header)
    window = fields.integer("attention.sliding_window", 0, low=0)
    windows = read_gguf_windows(fields, sizes.num_layers, window, PATTERN) if window else ()
    sizes = replace(sizes, norms=NORMS, qk_norm="heads", sliding_windows=windows)
    return sizes.with_layer_ropes(sizes.rope, None).declare()


EXAONE4: Final = Architecture(
    name="exaone4",
    hf_readers={
        "Exaone4ForCausalLM": Exaone4ConfigReader("exaone4", read_windows, qkv_bias=False, norms=NORMS, qk_norm="heads")
    },
    gguf_readers={"exaone4": read_exaone4_gguf},
    gguf_names=OLMO.gguf_names,
)
