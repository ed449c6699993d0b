"""EXAONE 4 (LG AI Research, 2025): OLMo 2 with a norm of each query and key head.

The model of 32 billion parameters has windows in three of four layers, and no rotary embedding in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.architectures.olmo import NORMS, OLMO
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.layer_fields import read_windows
from chairlift.models.reading.llama_sizes import LlamaSizes


class Exaone4ConfigReader(LlamaConfigReader):
    """The reader of EXAONE 4."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        return sizes.with_layer_ropes(sizes.rope, None)


def _windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    """Return the window of each layer; empty without windows, where every layer has a rotary embedding."""
    windows = read_windows(fields, layers, pattern=4, default=4096)
    return () if fields.window(4096) is None else windows


_READER: Final = Exaone4ConfigReader("exaone4", _windows, qkv_bias=False, norms=NORMS, qk_norm="heads")

EXAONE4: Final = Architecture(
    name="exaone4",
    hf_readers={"Exaone4ForCausalLM": _READER},
    gguf_readers={"exaone4": _READER},
    gguf_names=OLMO.gguf_names,
)
