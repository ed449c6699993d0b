"""The memory that an engine will need, computed from the files of its model before it is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from chairlift.config import EngineConfig
from chairlift.engine.startup.memory_plan import MemoryPlan, PlannedDraft, draft_config, plan_memory
from chairlift.engine.startup.pool_plan import FREE_MEMORY_SHARE
from chairlift.engine.startup.pooling_options import read_pooling, with_pooled_prefixes, without_options_of_all_models
from chairlift.kernels.kernel_memory import total
from chairlift.loading.resolve import resolve_model
from chairlift.system.memory_amounts import format_memory

PROCESS_BYTES: Final = 256 << 20
"""Memory of an engine process without a model: Python, the libraries of torch, tokenizer and message buffers. With
torch 2.13 it is about 215 MiB."""

SERVER_PROCESSES_BYTES: Final = 304 << 20
"""Memory of the two processes of a server without its model: the sum of their proportional set sizes (Pss in
/proc/PID/smaps_rollup) after 100 chats, less the planned weights, activations, K and V. With torch 2.13 and the default
model it is about 275 MiB, of which the HTTP process has 110."""


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


def plan_required_memory(
    config: EngineConfig, memory_bytes: int, common: EngineConfig | None = None
) -> tuple[EngineConfig, RequiredMemory]:
    """Plan an engine within a budget. K and V get the same share of the rest as in a server with one model, unless the
    configuration has their size.

    Args:
        common: the configuration of all models of the server. An encoder does not get its options that have no use for
            an encoder.

    Returns:
        The configuration with the planned size of the pool, and the memory that it needs, which may exceed the budget.

    Raises:
        ModelLoadError: the model cannot be found or is not supported.
        ConfigError: this model cannot satisfy an option, or the budget leaves nothing for K and V.
    """
    source = resolve_model(config.model, accept_terms=config.accept_terms)
    model_config = source.config(needs_predictor=config.needs_predictor)
    if model_config.encoder is not None and common is not None:
        config = without_options_of_all_models(config, common, source.name)
    model_config, pooling = read_pooling(config, source, model_config)
    config = with_pooled_prefixes(config, model_config, pooling)
    formats, name = source.formats(model_config), source.name
    draft = None
    if (speculative := config.speculative) is not None and speculative.model is not None:
        draft_source = resolve_model(speculative.model, accept_terms=config.accept_terms)
        draft_model = draft_source.config()
        draft = PlannedDraft(draft_config(config, speculative), draft_model, draft_source.formats(draft_model))

    def planned(config: EngineConfig) -> MemoryPlan:
        return plan_memory(
            config,
            model_config,
            formats,
            memory_bytes - PROCESS_BYTES,
            FREE_MEMORY_SHARE[config.device_type],
            budget=f"models_memory_bytes={format_memory(memory_bytes)} for model {name!r}",
            is_pooling=pooling is not None,
            draft=draft,
        )

    plan = planned(config)
    if config.num_kv_blocks is None and plan.kv_bytes != config.kv_cache_memory_bytes:
        config = replace(config, kv_cache_memory_bytes=plan.kv_bytes)
        plan = planned(config)  # Checkpoints may use all of a budget that is given.
    return config, RequiredMemory(total(plan.weights), total(plan.activations), plan.pool.num_bytes)
