"""Checks the options of an engine that depend on whether its model generates text, and reads its pooling if not."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.loading.model_source import ModelSource
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.pooling import PoolingConfig

logger = logging.getLogger("chairlift")

_OPTIONS: Final = """
    kv_cache_memory_bytes num_kv_blocks kv kv_arena kv_cache_dtype enable_prefix_caching prefix_cache_dir
    prefix_cache_disk_bytes speculative_config lora_modules max_loras record_trace preemption_mode swap_space
    length_predictor pacing_tokens_per_second classifier_from_token
"""
ENCODER_LACKS: Final = tuple(_OPTIONS.split())
"""Options of KV memory, of generation and of adapters. An encoder has none of them."""


def without_options_of_all_models(config: EngineConfig, common: EngineConfig, name: str) -> EngineConfig:
    """Reset the options in ENCODER_LACKS that an encoder has from `common`, the configuration of all models of the
    server."""
    defaults = EngineConfig()
    unused = {
        option: getattr(defaults, option)
        for option in ENCODER_LACKS
        if getattr(config, option) == getattr(common, option) != getattr(defaults, option)
    }
    if unused:
        logger.info("model %r is an encoder, on which %s of all models have no effect", name, ", ".join(unused))
    return replace(config, **unused)


def read_pooling(
    config: EngineConfig, source: ModelSource, model_config: ModelConfig
) -> tuple[ModelConfig, PoolingConfig | None]:
    """The model without a head that it does not need, and its pooling, which is None if it generates text.

    Raises:
        ModelLoadError: as `ModelSource.pooling`.
        ConfigError: an option does not fit the model.
    """
    pooling = source.pooling(model_config)
    if model_config.encoder is not None:
        _check_encoder_options(config, source.name)
    elif config.classifier_from_token is not None:
        if pooling is not None and not pooling.needs_head:
            raise ConfigError(
                f"classifier_from_token has no use for {source.name!r}, which computes vectors: remove it"
            )
        own = PoolingConfig("score", model_config.hidden_size, modes=("lasttoken",), has_own_prompt=True)
        pooling = pooling or own
    if pooling is None:
        return model_config, None
    if config.record_trace is not None:
        raise ConfigError(f"record_trace records outputs, and {source.name!r} computes vectors: remove record_trace")
    if not pooling.reads_last_token_only:
        _check_options_of_states(config, source.name)
    context = min(model_config.max_position_embeddings, pooling.text.max_tokens or 1 << 30)
    return pooling.without_unused_head(replace(model_config, max_position_embeddings=context)), pooling


def with_pooled_prefixes(config: EngineConfig, model: ModelConfig, pooling: PoolingConfig | None) -> EngineConfig:
    """The configuration without a prefix cache, if a decoder pools the hidden states of all tokens of a text."""
    needs_all = model.encoder is None and pooling is not None and not pooling.reads_last_token_only
    return replace(config, enable_prefix_caching=False) if needs_all else config


def _check_options_of_states(config: EngineConfig, name: str) -> None:
    """Reject options that skip the computation of tokens."""
    swaps = config.preemption_mode == "swap"
    given = {"enable_prefix_caching": config.enable_prefix_caching, "preemption_mode": swaps}
    for option, is_set in given.items():
        if is_set:
            raise ConfigError(f"{option} has no use for {name!r}, which pools the states of all tokens: remove it")


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
