"""dots.llm1 (rednote, 2025): the attention of Qwen3, and the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, no_windows
from chairlift.models.reading.architecture import Architecture, stacked_experts
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import read_routed_experts
from chairlift.models.reading.layer_fields import read_layer_windows
from chairlift.models.reading.llama_sizes import ExpertSizes, LlamaSizes


def _read_experts(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes | None:
    """Read the experts. In published files `scoring_func` has the value of `topk_method`."""
    if fields.get("scoring_func") == "noaux_tc":
        fields.set_names({"topk_method": "scoring_func", "scoring_func": "topk_method"})
    return read_routed_experts(fields, sizes)


def _read_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    """Read the windows, which the layers from `max_window_layers` have in a file without `layer_types`."""
    window, first = fields.window(4096), fields.integer("max_window_layers", 62, low=0)
    if (types := fields.get("layer_types")) is not None:
        return read_layer_windows(fields, types, layers, window)
    return tuple(window if layer >= first else None for layer in range(layers))


_READER: Final = LlamaConfigReader(
    "dots1",
    _read_windows,
    qk_norm="heads",
    experts=_read_experts,
    defaults={"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    gguf_defaults={"norm_topk_prob": False},
    required={"mlp_layer_types": None},
    ignored=("use_sliding_window",),
)
DOTS1: Final = Architecture(
    name="dots1",
    hf_readers={"Dots1ForCausalLM": _READER},
    gguf_readers={"dots1": replace(_READER, windows=no_windows)},
    stacked_names=stacked_experts(),
)
