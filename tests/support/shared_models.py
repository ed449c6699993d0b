"""A loaded model that the engines of consecutive tests share."""

from __future__ import annotations

from typing import Final

from chairlift.config import EngineConfig
from chairlift.engine.startup.loaded_model import LoadedModel, load_model

LOADING_OPTIONS: Final = (
    *("model", "load_format", "device", "dtype", "kernels", "quantization", "kv_cache_dtype", "num_threads"),
    *("skip_tokenizer_init", "generation_config", "override_generation_config", "num_loras", "max_lora_rank"),
    "needs_predictor",
)
"""The properties of EngineConfig that affect how a model is loaded."""

_last: list[LoadedModel] = []


def shared_model(config: EngineConfig) -> LoadedModel:
    """The model of a configuration with `num_kv_blocks`, which is loaded unless the last one has its loading options.

    An engine finds KV memory and states as earlier engines have left them, and the time of steps is measured once.
    """
    if not _last or any(getattr(config, name) != getattr(_last[0].engine_config, name) for name in LOADING_OPTIONS):
        _last[:] = [load_model(config)]
    return _last[0]
