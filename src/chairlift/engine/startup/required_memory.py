"""The memory that an engine will need, computed from the files of its model before it is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from chairlift.config import EngineConfig
from chairlift.engine.startup.memory_plan import kv_slot_bytes, total
from chairlift.engine.startup.startup_plan import (
    encoder_token_budget,
    plan_layout,
    plan_pool,
    planned_activations,
    planned_weights,
)
from chairlift.errors import ConfigError
from chairlift.kernels.choice import choose_kernels
from chairlift.loading.pooling_config import load_pooling_config
from chairlift.loading.resolve import load_config, matrix_formats, resolve_model
from chairlift.worker.kv_cache_plan import FREE_MEMORY_SHARE
from chairlift.worker.memory import format_memory

PROCESS_BYTES: Final = 256 << 20
"""Memory of an engine process without a model: Python, the libraries of torch, tokenizer and message buffers. With
torch 2.13 it is about 215 MiB."""


@dataclass(frozen=True, slots=True)
class RequiredMemory:
    """The memory of an engine process in bytes, by use."""

    weights: int
    activations: int
    kv_cache: int
    process: int = PROCESS_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.kv_cache + self.process

    def __str__(self) -> str:
        return (
            f"{format_memory(self.total)} (weights {format_memory(self.weights)}, K and V "
            f"{format_memory(self.kv_cache)}, activations {format_memory(self.activations)}, process "
            f"{format_memory(self.process)})"
        )


def plan_required_memory(config: EngineConfig, memory_bytes: int) -> tuple[EngineConfig, RequiredMemory]:
    """Plan an engine within a budget. K and V get the same share of the rest as in a server with one model, unless the
    configuration has their size.

    Returns:
        The configuration with the planned size of the pool, and the memory that it needs, which may exceed the budget.

    Raises:
        ModelLoadError: the model cannot be found or is not supported.
        ConfigError: this model cannot satisfy an option, or the budget leaves nothing for K and V.
    """
    files = resolve_model(config.model, accept_terms=config.accept_terms)
    model_config = load_config(files)
    choice = choose_kernels(config, model_config.dtype)
    device = config.device.split(":")[0]
    context = model_config.max_position_embeddings
    layout = plan_layout(config, model_config)
    limits = config.scheduler_config(min(config.max_model_len or context, context))
    if model_config.encoder is not None and config.max_num_batched_tokens is None:
        limits = replace(limits, max_num_batched_tokens=encoder_token_budget(config, limits.max_model_len))
    elif config.kv_cache_dtype == "auto" and load_pooling_config(files, model_config) is not None:
        choice = replace(choice, kv_cache_dtype=choice.dtype)
    weights = total(planned_weights(model_config, choice, device, matrix_formats(files, model_config), config))
    activations = total(planned_activations(model_config, choice, device, limits, config.block_size, layout))
    if model_config.encoder is not None:
        return config, RequiredMemory(weights, activations, 0)
    if config.num_kv_blocks is None and config.kv_cache_memory_bytes is None:
        left = memory_bytes - weights - activations - PROCESS_BYTES
        if left <= 0:
            raise ConfigError(
                f"models_memory_bytes={format_memory(memory_bytes)} leaves nothing for K and V of model "
                f"{files.name!r}: it needs {RequiredMemory(weights, activations, 0)}. Raise --models-memory-bytes, or "
                "lower max_model_len or max_num_batched_tokens of the model"
            )
        config = replace(config, kv_cache_memory_bytes=int(left * FREE_MEMORY_SHARE[device]))
    slot_bytes = kv_slot_bytes(model_config, choice.kv_cache_dtype, layout)
    pool = plan_pool(config, slot_bytes, context, 0, layout.windows)
    return config, RequiredMemory(weights, activations, pool.num_bytes)
