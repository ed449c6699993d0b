"""SmolLM3 (Hugging Face, 2025): `LlamaSizes` with layers that have no rotary embedding, every fourth by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.layer_fields import read_layer_windows


def read_smollm3(fields: ConfigFields) -> ModelConfig:
    """Read a SmolLM3 model. GGUF files do not contain the layers without rotary embedding."""
    sizes = _READER.read_sizes(fields)
    has_rope = _read_layers_with_rope(fields, sizes.num_layers)
    windows = sizes.sliding_windows
    if not windows and fields.flag("use_sliding_window", False) and fields.get("sliding_window") is not None:
        window = fields.integer("sliding_window")
        windows = [None if rotates else window for rotates in has_rope]
    ropes = [sizes.rope if rotates else None for rotates in has_rope]
    return replace(sizes, ropes=ropes, sliding_windows=windows).declare()


def _read_layers_with_rope(fields: ConfigFields, layers: int) -> list[bool]:
    interval = fields.integer("no_rope_layer_interval", 4)
    flags = fields.get("no_rope_layers")
    if flags is None:
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or not all(flag in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", f"must hold 0 or 1 for each of {layers} layers, got {flags!r}")
    return [bool(flag) for flag in flags[:layers]]


def _windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    """Return the windows that `layer_types` declares; empty if the file does not contain it."""
    fields.ignore("max_window_layers")  # transformers ignores it.
    types = fields.get("layer_types")
    uses_windows = fields.flag("use_sliding_window", False)
    window = fields.window() if uses_windows else fields.get("sliding_window")
    return () if types is None else read_layer_windows(fields, types, layers, window if uses_windows else None)


_READER: Final = LlamaConfigReader(
    "smollm3", _windows, reads_mlp_bias=True, default_theta=2_000_000.0, defaults={"tie_word_embeddings": True}
)

SMOLLM3: Final = Architecture(
    name="smollm3",
    hf_readers={"SmolLM3ForCausalLM": read_smollm3},
    gguf_readers={"smollm3": read_smollm3},
    gguf_interleaved=frozenset(("smollm3",)),
)
