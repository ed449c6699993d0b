"""How a model turns texts into vectors or scores, by its files and by the options, which are checked against it."""

from __future__ import annotations

from typing import Final

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.loading.pooling_config import load_pooling_config
from chairlift.loading.resolve import ModelFiles
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.pooling import PoolingConfig

ENCODER_LACKS: Final = (
    "kv_cache_memory_bytes",
    "num_kv_blocks",
    "kv",
    "kv_arena",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "prefix_cache_dir",
    "speculative_config",
    "lora_modules",
    "max_loras",
    "record_trace",
    "preemption_mode",
    "swap_space",
    "length_predictor",
    "pacing_tokens_per_second",
    "classifier_from_token",
)
"""Options of KV memory, of generation and of adapters. An encoder has none of them."""


def read_pooling(
    config: EngineConfig, files: ModelFiles, model_config: ModelConfig
) -> tuple[ModelConfig, PoolingConfig | None]:
    """The model without a head that it does not need, and its pooling, which is None if it generates text.

    Raises:
        ModelLoadError: as `load_pooling_config`.
        ConfigError: an option does not fit the model.
    """
    pooling = load_pooling_config(files, model_config)
    if model_config.encoder is not None:
        _check_encoder_options(config, files.name)
    elif config.classifier_from_token is not None:
        if pooling is not None:
            raise ConfigError(f"classifier_from_token has no use for {files.name!r}, which computes vectors: remove it")
        pooling = PoolingConfig("score", "last")
    if pooling is not None and config.record_trace is not None:
        raise ConfigError(f"record_trace records outputs, and {files.name!r} computes vectors: remove record_trace")
    return (model_config if pooling is None else pooling.without_unused_head(model_config)), pooling


def _check_encoder_options(config: EngineConfig, name: str) -> None:
    defaults = EngineConfig()
    for option in ENCODER_LACKS:
        if getattr(config, option) != getattr(defaults, option):
            raise ConfigError(f"{option} has no use for {name!r}, an encoder: remove it")
    if config.device != "cpu" or config.batching != "continuous":
        raise ConfigError(
            f"model {name!r} is an encoder, which runs on device=cpu with batching=continuous, got "
            f"device={config.device} and batching={config.batching}"
        )
    if config.skip_tokenizer_init:
        raise ConfigError(f"skip_tokenizer_init cannot be combined with {name!r}, an encoder that reads texts")
