"""OLMo 2 and OLMo 3 (Ai2, 2024 and 2025): `LlamaSizes` with norms after each branch, and norms of query and key across
heads.

OLMo 3 adds windows in three of four layers, whose rotary embedding is not scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, no_windows
from chairlift.models.declaration import ModelConfig, RopeConfig
from chairlift.models.reading.architecture import Architecture, GGUFHeader
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_sizes import GGUF_NAMES, read_gguf_sizes, read_gguf_windows
from chairlift.models.reading.layer_fields import read_layer_windows, repeat_windows
from chairlift.models.reading.llama_sizes import LlamaSizes, NormNames
from chairlift.models.reading.rope_fields import read_layer_ropes

NORMS: Final = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
PATTERN: Final = 4
"""In files that do not contain it: every n-th layer of OLMo 3 has no window."""

THETA: Final = 500_000.0
"""Base of the rotary embedding of OLMo 3, in files that do not contain it."""


class OlmoConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of OLMo 2."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        return replace(super().read_sizes(fields), norms=NORMS, qk_norm="rows")


class Olmo3ConfigReader(OlmoConfigReader):
    """The reader of the `config.json` of OLMo 3."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        local, whole = read_layer_ropes(fields, fields.number("rope_theta", THETA), THETA)
        return replace(sizes, ropes=[whole if window is None else local for window in sizes.sliding_windows])

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        return RopeConfig()  # Each layer has its own.


def _windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    window = fields.integer("sliding_window", 4096)
    types = fields.get("layer_types")
    return (
        repeat_windows(layers, window, PATTERN) if types is None else read_layer_windows(fields, types, layers, window)
    )


def read_olmo_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of OLMo 2, or of OLMo 3, which has windows."""
    fields, sizes = header.fields, read_gguf_sizes(header)
    window = fields.integer("attention.sliding_window", 0, low=0)
    windows = read_gguf_windows(fields, sizes.num_layers, window or None, PATTERN)
    local = RopeConfig(theta=fields.number("rope.freq_base_swa", sizes.rope.theta))
    ropes = [sizes.rope if each is None else local for each in windows]
    return replace(
        sizes, architecture="olmo", norms=NORMS, ropes=ropes, sliding_windows=windows, qk_norm="rows"
    ).declare()


OLMO: Final = Architecture(
    name="olmo",
    hf_readers={
        "Olmo2ForCausalLM": OlmoConfigReader("olmo2", no_windows, architecture="olmo"),
        "Olmo3ForCausalLM": Olmo3ConfigReader("olmo3", _windows, architecture="olmo"),
    },
    gguf_readers={"olmo2": read_olmo_gguf},
    gguf_names={
        **GGUF_NAMES,
        "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
        "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
    },
)
