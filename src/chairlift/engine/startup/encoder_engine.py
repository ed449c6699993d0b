"""Prepares the engine of an encoder: it has no KV memory, and computes each text in one step."""

from __future__ import annotations

from dataclasses import replace

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core.kv.no_kv_memory import NoKVMemory
from chairlift.engine.startup.loaded_model import LoadedEncoder
from chairlift.engine.startup.memory_plan import encoder_token_budget
from chairlift.engine.startup.pool_plan import NO_POOL
from chairlift.engine.startup.prepared_engine import PreparedEngine
from chairlift.errors import ConfigError
from chairlift.kernels.kernel_memory import total
from chairlift.system.memory_amounts import format_memory
from chairlift.worker.encoder_runner import EncoderRunner


def prepare_encoder(config: EngineConfig, loaded: LoadedEncoder) -> PreparedEngine:
    """Prepare an engine in which no text is longer than a step.

    Raises:
        ConfigError: `max_model_len` exceeds what the model computes, or the token budget is smaller.
    """
    longest = loaded.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len={config.max_model_len} exceeds the {longest} tokens of the model: reduce it")
    max_model_len = config.max_model_len or longest
    budget = encoder_token_budget(config, max_model_len)
    limits = replace(config, max_num_batched_tokens=budget).scheduler_config(max_model_len)
    limits = replace(limits, is_pooling=True, enable_chunked_prefill=False)
    return PreparedEngine(
        limits=limits,
        kv_cache_plan=NO_POOL,
        manager=NoKVMemory(),
        runner=EncoderRunner(loaded.model, loaded.row_functions()),
        max_request_slots=max_model_len,
        describe=lambda: _describe(loaded, limits),
    )


def _describe(loaded: LoadedEncoder, limits: SchedulerConfig) -> list[str]:
    return [
        f"computes {loaded.pooling.description}",
        f"weights: {format_memory(total(loaded.planned_weights))}; texts of at most {limits.max_model_len} tokens, "
        f"max_num_seqs={limits.max_num_seqs} and max_num_batched_tokens={limits.max_num_batched_tokens} in a step",
    ]
