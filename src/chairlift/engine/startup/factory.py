"""Builds an engine from its configuration: one builder for decoders and encoders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from chairlift.clock import Clock, MonotonicClock
from chairlift.config import EngineConfig
from chairlift.core.engine_core import EngineCore, Executor
from chairlift.core.factory import make_scheduler
from chairlift.engine.lora_adapters import AdapterLoader
from chairlift.engine.request_limits import RequestLimits
from chairlift.engine.served_engine import EngineFacts, ServedEngine
from chairlift.engine.startup.decoder_engine import prepare_decoder
from chairlift.engine.startup.encoder_engine import prepare_encoder
from chairlift.engine.startup.loaded_model import LoadedDecoder, LoadedEncoder, LoadedModel, load_model
from chairlift.engine.startup.pool_plan import beam_search_problem
from chairlift.engine.startup.prepared_engine import PreparedEngine
from chairlift.engine.startup.startup_log import StepTimeLog
from chairlift.engine.startup.weight_plan import step_weight_bytes
from chairlift.events import EngineStarted, EventBroadcaster, EventSink
from chairlift.loading.resolve import model_root
from chairlift.lora import LoRARequest
from chairlift.observability.event_log import EventFile
from chairlift.observability.trace_recorder import TraceRecorder
from chairlift.policy_class import reserves, uses_priority
from chairlift.worker.disk_block_store import DiskBlockStore

logger = logging.getLogger("chairlift")

STEPS_AHEAD: Final = {"cpu": 0, "cuda": 1}
"""Steps that are submitted in advance: a CUDA device runs one step ahead of the host; on the CPU `submit` computes."""


class Engine(ServedEngine):
    """A loaded model with its scheduler, limits and event log."""

    def __init__(
        self,
        facts: EngineFacts,
        core: EngineCore,
        loaded: LoadedModel,
        seed: int | None,
        adapter_loader: AdapterLoader,
        files: Sequence[EventFile | TraceRecorder | DiskBlockStore],
    ) -> None:
        super().__init__(facts, loaded.tokenizer, seed, loaded.grammars)
        self.core = core
        self.loaded = loaded
        self.adapter_loader = adapter_loader
        self._files = files

    def close(self) -> None:
        """Close the prefix cache on disk, the event log and the trace file."""
        for file in self._files:
            file.close()

    def reopen_files(self) -> None:
        """Reopen the event log and the trace file, such as after a rotation."""
        for file in self._files:
            if not isinstance(file, DiskBlockStore):
                file.reopen()


def build_engine(
    config: EngineConfig,
    *,
    loaded: LoadedModel | None = None,
    clock: Clock | None = None,
    events: EventSink | None = None,
    around_executor: Callable[[Executor], Executor] | None = None,
    turn: AbstractContextManager[None] | None = None,
) -> Engine:
    """Load the model, plan the KV pool and the token budget, and connect the scheduler with the model runner.

    Args:
        loaded: a model that `load_model` has loaded for this configuration; None loads it. Engines that are compared
            over one model need `num_kv_blocks`, because the free memory differs between them.
        clock: the engine's clock; None selects the monotonic clock.
        events: a listener in addition to `config.event_log`.
        around_executor: wraps the model runner in another executor.
        turn: is held while a step is measured.

    Raises:
        ModelLoadError: the model cannot be found, read or run.
        ConfigError: this model or this machine cannot satisfy an option.
    """
    clock, is_shared = clock or MonotonicClock(), loaded is not None
    loaded = loaded or load_model(config)
    assert loaded.engine_config.model == config.model, "the model was loaded for another configuration"
    adapters = AdapterLoader(loaded.config, loaded.lora)
    modules = adapters.load_all(config.lora_modules or {})
    if isinstance(loaded, LoadedEncoder):
        prepared = prepare_encoder(config, loaded)
    else:
        assert isinstance(loaded, LoadedDecoder), "there are decoders and encoders"
        prepared = prepare_decoder(config, loaded, turn)
    executor = prepared.runner if around_executor is None else around_executor(prepared.runner)
    recorder = None if config.record_trace is None else TraceRecorder(config.record_trace)
    log = None if config.event_log is None else EventFile(config.event_log)
    logs = [each for each in (log, recorder) if each is not None]
    sinks: list[EventSink] = [*logs, *(() if events is None else (events,))]
    sink = EventBroadcaster(*sinks, StepTimeLog(prepared.limits)) if sinks else None
    started = _engine_started(config, loaded, prepared, clock.now())
    if sink is not None:
        sink.emit(started)
    if not is_shared and logger.isEnabledFor(logging.INFO):
        for line in prepared.describe():
            logger.info("%s", line)
    scheduler = make_scheduler(prepared.limits, prepared.manager, sink)
    on_add = None if recorder is None else recorder.on_add
    core = EngineCore(scheduler, executor, clock, STEPS_AHEAD[loaded.device.type], on_add)
    facts = _engine_facts(config, loaded, prepared, started, modules)
    return Engine(facts, core, loaded, config.seed, adapters, [*prepared.block_stores, *logs])


def _engine_started(config: EngineConfig, loaded: LoadedModel, prepared: PreparedEngine, now: float) -> EngineStarted:
    """The first event of the log."""
    plan, choice = prepared.kv_cache_plan, loaded.choice
    return EngineStarted(
        time=now,
        model=loaded.name,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        kv=config.kv,
        enable_prefix_caching=prepared.has_prefix_cache,
        kv_arena=config.kv_arena if reserves(config.kv) else None,
        kernels=choice.kernels,
        kv_cache_dtype=choice.kv_cache_dtype if plan.num_blocks else "",
        quantization=choice.quantization,
        weight_bytes=step_weight_bytes(loaded.config, choice.memory(loaded.device.type), loaded.formats),
        kv_bytes_per_slot=prepared.token_bytes,
        kv_bytes_per_block=plan.block_size * prepared.slot_bytes,
        kv_windows=list(plan.windows),
        state_bytes=plan.state_bytes,
        num_checkpoints=plan.num_checkpoints,
        checkpoint_interval=plan.checkpoint_interval,
        num_swap_blocks=plan.num_swap_blocks,
        **prepared.limits.event_fields(),
    )


def _engine_facts(
    config: EngineConfig,
    loaded: LoadedModel,
    prepared: PreparedEngine,
    started: EngineStarted,
    modules: tuple[LoRARequest, ...],
) -> EngineFacts:
    limits = prepared.limits
    return EngineFacts(
        model_name=loaded.name,
        model_config=loaded.config,
        scheduler_config=limits,
        kv_cache_plan=prepared.kv_cache_plan,
        limits=RequestLimits(
            limits.max_model_len,
            prepared.max_request_slots,
            uses_priority(config.scheduling_policy),
            loaded.sampling_defaults.max_new_tokens,
            loaded.pooling is not None,
            beam_search_problem(config, prepared.kv_cache_plan),
        ),
        started=started,
        kernels=loaded.choice.description,
        sampling_defaults=loaded.sampling_defaults,
        pooling=loaded.pooling,
        root=model_root(config.model),
        lora_modules=modules,
        max_loras=config.num_loras,
    )
