"""The plan of an engine's memory: weights, activations of the largest step, and the KV pool.

A plan is made before a model is loaded, from its declaration and the formats in its files. The memory of the process
(interpreter, libraries, a CUDA context) is not included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from chairlift.config import EngineConfig
from chairlift.core.factory import KVPool
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.startup.activation_plan import plan_activations
from chairlift.engine.startup.pool_plan import (
    NO_POOL,
    CacheSizes,
    kv_slot_bytes,
    plan_layout,
    plan_pool,
    planned_pool,
    swap_bytes_in,
)
from chairlift.engine.startup.weight_plan import MatrixFormats, plan_lora, plan_weights
from chairlift.errors import ConfigError
from chairlift.kernels.choice import KernelChoice, choose_kernels
from chairlift.kernels.kernel_memory import MemoryItem, total
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.speculative_config import SpeculativeConfig
from chairlift.system.memory_amounts import format_memory

ENCODER_TOKENS: Final = 2048
"""The default token budget of an encoder, unless a text may be longer. More tokens in a step are not faster."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The planned memory of an engine.

    Attributes:
        weights, activations: the items of each kind.
        token_bytes: bytes of K and V of one token in all layers.
        slot_bytes: the same in the layers of one group, and in the draft model.
        memory_bytes: memory of the engine; None if the size of the pool is given.
        free_share: share of the memory left by weights and activations that K and V get.
        kv_bytes: memory for the pool; None if it is given in blocks.
        kv_pool: the pool with its policy, and with `max_model_len` as the engine resolves it.
    """

    choice: KernelChoice
    weights: list[MemoryItem]
    activations: list[MemoryItem]
    token_bytes: int
    slot_bytes: int
    memory_bytes: int | None
    free_share: float
    kv_bytes: int | None
    pool: KVCachePlan
    kv_pool: KVPool

    @property
    def max_model_len(self) -> int:
        return self.kv_pool.max_model_len


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A draft model, whose memory is planned together with the memory of a model.

    Attributes:
        config: the configuration that it is loaded with.
        formats: see plan_memory.
    """

    config: EngineConfig
    model_config: ModelConfig
    formats: MatrixFormats


def draft_config(config: EngineConfig, speculative: SpeculativeConfig) -> EngineConfig:
    """The configuration that the draft model of an engine is loaded with."""
    return replace(
        config,
        model=speculative.model,
        quantization=speculative.quantization,
        speculative_config=None,
        generation_config="vllm",
        override_generation_config=None,
        event_log=None,
        record_trace=None,
    )


def plan_memory(
    config: EngineConfig,
    model_config: ModelConfig,
    formats: MatrixFormats,
    memory_bytes: int | None,
    free_share: float = 1.0,
    *,
    budget: str | None = None,
    is_pooling: bool = False,
    draft: PlannedDraft | None = None,
) -> MemoryPlan:
    """Plan the memory of an engine.

    Args:
        formats: the formats of the matrices in the model's file, see `ModelSource.formats`.
        memory_bytes: memory for weights, activations, K and V together. It is required unless `config` has the size of
            the pool.
        free_share: share of the memory left by weights and activations that K and V get.
        budget: a description of `memory_bytes` for messages; None for "memory=24 GiB".
        is_pooling: whether the model computes vectors or scores.
        draft: the draft model, whose K and V and states are in the same pool; None if there is none.

    Raises:
        ConfigError: the memory is too small, or an option cannot be honoured. The message has the arithmetic.
    """
    choice = choose_kernels(config, model_config.dtype, is_pooling=is_pooling)
    context, layout = model_config.max_position_embeddings, plan_layout(config, model_config)
    # These limits are preliminary, because the length that the pool allows is not known yet.
    limits = config.scheduler_config(min(config.max_model_len or context, context))
    if model_config.encoder is not None:
        limits = replace(limits, max_num_batched_tokens=encoder_token_budget(config, limits.max_model_len))
    memory = choice.memory(config.device_type)
    weights = plan_weights(model_config, memory, formats) + plan_lora(model_config, config, choice.dtype)
    activations = plan_activations(model_config, memory, limits, config.block_size, layout)
    sizes = CacheSizes.of_model(model_config, choice.kv_cache_dtype, layout)
    if draft is not None:
        other = choose_kernels(draft.config, draft.model_config.dtype)
        kernels = other.memory(draft.config.device_type)
        weights += plan_weights(draft.model_config, kernels, draft.formats)
        activations += plan_activations(draft.model_config, kernels, limits, config.block_size)
        sizes = sizes.with_draft(draft.model_config, other.kv_cache_dtype)
    kv_bytes, pool = config.kv_cache_memory_bytes, NO_POOL
    kv_pool = KVPool(pool.num_blocks, pool.block_size, limits.max_model_len)
    if model_config.encoder is None:
        if config.num_kv_blocks is None and kv_bytes is None:
            kv_bytes = _left_for_kv(config, memory_bytes, total(weights), total(activations), free_share, budget)
        pool = plan_pool(config, sizes, kv_bytes or 0)
        kv_pool = planned_pool(config, sizes.context, pool)
    return MemoryPlan(
        choice=choice,
        weights=weights,
        activations=activations,
        token_bytes=kv_slot_bytes(model_config, choice.kv_cache_dtype),
        slot_bytes=sizes.slot_bytes + sizes.draft_slot_bytes,
        memory_bytes=memory_bytes,
        free_share=free_share,
        kv_bytes=kv_bytes,
        pool=pool,
        kv_pool=kv_pool,
    )


def _left_for_kv(
    config: EngineConfig,
    memory_bytes: int | None,
    weights: int,
    activations: int,
    free_share: float,
    budget: str | None,
) -> int:
    if memory_bytes is None:
        raise ConfigError("the size of the memory is unknown: give memory, kv_cache_memory_bytes or num_kv_blocks")
    left = int((memory_bytes - weights - activations) * free_share)
    if left <= 0:
        raise ConfigError(
            f"{budget or f'memory={format_memory(memory_bytes)}'} leaves nothing for K and V: the weights take "
            f"{format_memory(weights)} and the activations of a step up to {format_memory(activations)}. Give more "
            "memory, choose a smaller dtype or model, or lower max_num_batched_tokens, max_num_seqs or max_model_len"
        )
    if (left := left - swap_bytes_in(config, config.device_type)) <= 0:
        raise ConfigError(
            f"the swap space of {format_memory(config.swap_bytes)} leaves nothing for K and V: lower swap_space, or "
            "set preemption_mode=recompute"
        )
    return left


def encoder_token_budget(config: EngineConfig, max_model_len: int) -> int:
    """The token budget of a step of an encoder, which computes each text in one step."""
    return config.max_num_batched_tokens or max(ENCODER_TOKENS, max_model_len, config.max_num_seqs)
