"""Builds an engine from its configuration: model, KV pool, token budget, scheduler and model runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from chairlift.clock import Clock, MonotonicClock
from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core.baselines.selection import make_kv_cache_manager, make_scheduler
from chairlift.core.engine_core import EngineCore, Executor
from chairlift.core.kv.no_kv_memory import NoKVMemory
from chairlift.core.scheduler import Scheduler
from chairlift.engine.input_processor import RequestLimits
from chairlift.engine.lora_adapters import AdapterLoader
from chairlift.engine.served_engine import EngineFacts, PoolingFacts, ServedEngine
from chairlift.engine.startup.disk_prefix_cache import open_block_store
from chairlift.engine.startup.draft_model import provide_draft_model
from chairlift.engine.startup.encoder_engine import (
    LoadedEncoder,
    encoder_limits,
    load_encoder,
    log_encoder,
    make_encoder_runner,
)
from chairlift.engine.startup.loaded_model import LoadedModel, load_model
from chairlift.engine.startup.memory_plan import (
    kv_slot_bytes,
    plan_activations,
    plan_layout,
    plan_pool,
    planned_pool,
    step_weight_bytes,
)
from chairlift.engine.startup.startup_log import startup_summary
from chairlift.engine.startup.token_budget import (
    ChunkTimer,
    describe_chunks,
    describe_rows,
    measure_rows,
    measure_steps,
)
from chairlift.events import EngineStarted, EventBroadcaster, EventFile, EventSink, open_event_log
from chairlift.kernels.registry import find_kernel_set
from chairlift.loading.resolve import load_config, resolve_model
from chairlift.models.kv_layout import KVLayout
from chairlift.models.parameter_memory import parameter_bytes
from chairlift.observability.trace_recorder import TraceRecorder
from chairlift.sampling_params import SamplingDefaults
from chairlift.step_time import RowTime, StepTime
from chairlift.worker.disk_block_store import DiskBlockStore
from chairlift.worker.encoder_runner import normalize
from chairlift.worker.kv_cache_plan import KVCachePlan, default_memory_bytes
from chairlift.worker.memory import format_memory
from chairlift.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("chairlift")

STEPS_AHEAD = {"cpu": 0, "cuda": 1}
"""Steps that are submitted in advance: a CUDA device runs one step ahead of the host; on the CPU `submit` computes."""


@dataclass(frozen=True, slots=True)
class _Listeners:
    """The listeners to events: the event log and the trace recorder; `sink` passes events to all of them."""

    event_file: EventFile | None
    recorder: TraceRecorder | None
    sink: EventSink | None

    @classmethod
    def open(cls, config: EngineConfig, events: EventSink | None) -> _Listeners:
        event_file = open_event_log(config.event_log)
        recorder = None if config.record_trace is None else TraceRecorder(config.record_trace)
        sinks = [sink for sink in (event_file, recorder, events) if sink is not None]
        return cls(event_file, recorder, EventBroadcaster(*sinks) if sinks else None)


class Engine(ServedEngine):
    """A loaded model with its scheduler, limits and event log."""

    def __init__(
        self,
        facts: EngineFacts,
        core: EngineCore,
        loaded: LoadedModel | LoadedEncoder,
        seed: int | None,
        listeners: _Listeners,
        adapter_loader: AdapterLoader,
        block_store: DiskBlockStore | None = None,
    ) -> None:
        self.block_store = block_store
        super().__init__(facts, lambda: loaded.tokenizer, seed, loaded.grammars)
        self.core = core
        self.loaded = loaded
        self.adapter_loader = adapter_loader
        self._listeners = listeners

    def close(self) -> None:
        """Close the event log, the trace file and the prefix cache on disk."""
        if self.block_store is not None:
            self.block_store.close()
        for listener in (self._listeners.event_file, self._listeners.recorder):
            if listener is not None:
                listener.close()


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
    if loaded is None:
        files = resolve_model(config.model, accept_terms=config.accept_terms)
        if (model_config := load_config(files)).encoder is not None:
            encoder = load_encoder(config, files, model_config)
            return _build_encoder_engine(config, encoder, clock or MonotonicClock(), events, around_executor)
    logs_summary = loaded is None
    loaded = loaded or load_model(config)
    adapters = AdapterLoader(loaded.config, loaded.model.lora)
    modules = adapters.load_all(config.lora_modules or {})
    assert loaded.matches(config), "the model was loaded for another configuration"
    context = loaded.config.max_position_embeddings
    layout = plan_layout(config, loaded.config)
    slot_bytes = kv_slot_bytes(loaded.config, loaded.choice.kv_cache_dtype, layout)
    draft = provide_draft_model(config, loaded, layout)
    draft_bytes = 0 if draft is None else kv_slot_bytes(draft.config, draft.choice.kv_cache_dtype)
    slot_bytes += draft_bytes
    plan = plan_pool(config, slot_bytes, context, default_memory_bytes(loaded.device), layout.windows)
    pool = planned_pool(config, context, plan.num_blocks, plan.windows)
    limits = RequestLimits(
        pool.max_model_len,
        pool.max_request_slots,
        config.scheduling_policy != "fcfs",
        loaded.sampling_defaults.max_new_tokens,
        loaded.pooling is not None,
    )
    loaded.provide_kv_cache(plan, layout)
    step_time = _step_time(config, loaded, limits.max_model_len, plan, turn)
    row_time = None if config.speculative is None else _row_time(loaded, limits.max_model_len, plan, turn)
    draft_row_time = None
    if draft is not None:
        draft.provide_kv_cache(plan, KVLayout.one_group(draft.config.num_layers))
        draft_row_time = _row_time(draft, limits.max_model_len, plan, turn)
    scheduler_config = config.scheduler_config(
        limits.max_model_len, step_time=step_time, row_time=row_time, draft_row_time=draft_row_time
    )
    if loaded.pooling is not None:
        scheduler_config = replace(scheduler_config, is_pooling=True)
    block_store = open_block_store(config, loaded, plan, step_time)
    manager = make_kv_cache_manager(
        pool, config.has_prefix_cache, block_store, record_index_changes=config.enable_kv_cache_events
    )
    runner = _runner(loaded, scheduler_config.max_num_seqs, limits.max_model_len, plan, draft)
    executor = runner if around_executor is None else around_executor(runner)
    clock = clock or MonotonicClock()
    listeners = _Listeners.open(config, events)
    started = _started(config, loaded, scheduler_config, plan, clock.now())
    if listeners.sink is not None:
        listeners.sink.emit(started)
    if logs_summary:
        _log_startup_summary(config, loaded, scheduler_config, plan)
        _log_sampling_defaults(loaded)
        _log_step_times(scheduler_config, draft, plan.num_slots * draft_bytes)
    scheduler = make_scheduler(scheduler_config, manager, listeners.sink)
    on_add = None if listeners.recorder is None else listeners.recorder.on_add
    core = EngineCore(scheduler, executor, clock, STEPS_AHEAD[loaded.device.type], on_add)
    facts = EngineFacts(
        loaded.name,
        loaded.config,
        scheduler_config,
        plan,
        limits,
        started,
        loaded.choice.description,
        loaded.sampling_defaults,
        _pooling_facts(loaded),
        modules,
        config.num_loras,
    )
    return Engine(facts, core, loaded, config.seed, listeners, adapters, block_store)


def _build_encoder_engine(
    config: EngineConfig,
    loaded: LoadedEncoder,
    clock: Clock,
    events: EventSink | None,
    around_executor: Callable[[Executor], Executor] | None,
) -> Engine:
    """Connect the scheduler with an encoder, which has no KV memory."""
    limits = encoder_limits(config, loaded)
    runner = make_encoder_runner(loaded)
    executor: Executor = runner if around_executor is None else around_executor(runner)
    listeners = _Listeners.open(config, events)
    plan = KVCachePlan(0, 1, 0, "demand")
    started = EngineStarted(
        time=clock.now(),
        model=loaded.name,
        block_size=1,
        num_blocks=0,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        scheduling_policy=limits.scheduling_policy,
        kv=config.kv,
        enable_prefix_caching=False,
        kernels=loaded.choice.kernels,
        quantization=loaded.choice.quantization,
        weight_bytes=loaded.weight_bytes,
    )
    if listeners.sink is not None:
        listeners.sink.emit(started)
    log_encoder(loaded, limits)
    core = EngineCore(Scheduler(limits, NoKVMemory(), listeners.sink), executor, clock)
    request_limits = RequestLimits(
        limits.max_model_len, limits.max_model_len, config.scheduling_policy != "fcfs", is_pooling=True
    )
    facts = EngineFacts(
        loaded.name,
        loaded.config,
        limits,
        plan,
        request_limits,
        started,
        loaded.choice.description,
        SamplingDefaults(),
        PoolingFacts(loaded.pooling.task, loaded.config.hidden_size),
    )
    return Engine(facts, core, loaded, config.seed, listeners, AdapterLoader(loaded.config, None))


def _step_time(
    config: EngineConfig,
    loaded: LoadedModel,
    max_model_len: int,
    plan: KVCachePlan,
    turn: AbstractContextManager[None] | None,
) -> StepTime | None:
    """The measured time of steps, which limits chunks; None if the token budget is configured or has a fixed default.

    Static batches do not stream tokens, so their steps need not be short.
    """
    is_chosen = config.max_num_batched_tokens is None and config.batching == "continuous"
    if not is_chosen or loaded.choice.kernels != "native":
        return None
    if loaded.step_time is None:
        timer = _chunk_timer(loaded, max_model_len, plan, turn)
        measured = measure_steps(timer.seconds_of, timer.longest)
        loaded.step_time = None if measured is None else measured.step_time()
    return loaded.step_time


def _row_time(
    loaded: LoadedModel, max_model_len: int, plan: KVCachePlan, turn: AbstractContextManager[None] | None
) -> RowTime | None:
    """The measured time of steps by their number of sampled rows."""
    if loaded.row_time is None:
        timer = _chunk_timer(loaded, max_model_len, plan, turn)
        loaded.row_time = measure_rows(timer.sampled_seconds_of, timer.longest)
    return loaded.row_time


def _chunk_timer(
    loaded: LoadedModel, max_model_len: int, plan: KVCachePlan, turn: AbstractContextManager[None] | None
) -> ChunkTimer:
    runner = _runner(loaded, 1, max_model_len, plan)
    return ChunkTimer(runner, max_model_len, plan.block_size, plan.num_blocks, len(plan.windows), turn)


def _runner(
    loaded: LoadedModel, max_num_seqs: int, max_model_len: int, plan: KVCachePlan, draft: LoadedModel | None = None
) -> ModelRunner:
    return ModelRunner(
        loaded.model,
        loaded.model.plan,
        vocab_size=loaded.config.vocab_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=plan.block_size,
        device=loaded.device,
        sampling=find_kernel_set(loaded.choice.kernels).make_sampling(),
        pooler=_make_pooler(loaded),
        grammars=loaded.grammars,
        num_groups=len(plan.windows),
        draft_model=None if draft is None else draft.model,
        draft_plan=None if draft is None else draft.model.plan,
        lora=loaded.model.lora,
    )


def _pooling_facts(loaded: LoadedModel) -> PoolingFacts | None:
    if (pooling := loaded.pooling) is None:
        return None
    return PoolingFacts(pooling.task, loaded.config.hidden_size, is_reranker=pooling.classifier_tokens is not None)


def _make_pooler(loaded: LoadedModel) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function that computes vectors or scores from hidden states of last tokens; None if the model generates
    text."""
    if (pooling := loaded.pooling) is None:
        return None
    if (tokens := pooling.classifier_tokens) is not None:
        return lambda hidden: loaded.model.logits(hidden)[:, list(tokens)].diff()
    return lambda hidden: normalize(loaded.model.final_hidden(hidden), pooling.normalize)


def _started(
    config: EngineConfig, loaded: LoadedModel, scheduler_config: SchedulerConfig, plan: KVCachePlan, now: float
) -> EngineStarted:
    is_static = scheduler_config.batching == "static"
    return EngineStarted(
        time=now,
        model=loaded.name,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=scheduler_config.max_num_seqs,
        max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
        max_model_len=scheduler_config.max_model_len,
        scheduling_policy=scheduler_config.scheduling_policy,
        kv=config.kv,
        enable_prefix_caching=config.has_prefix_cache,
        batching=scheduler_config.batching,
        static_batch_size=scheduler_config.static_batch_size if is_static else None,
        static_run_to=scheduler_config.static_run_to if is_static else None,
        kv_arena=None if config.kv == "paged" else config.kv_arena,
        kernels=loaded.choice.kernels,
        kv_cache_dtype=loaded.choice.kv_cache_dtype,
        quantization=loaded.choice.quantization,
        weight_bytes=_read_bytes(loaded),
        kv_bytes_per_slot=kv_slot_bytes(loaded.config, loaded.choice.kv_cache_dtype),
        kv_bytes_per_block=plan.block_size
        * kv_slot_bytes(loaded.config, loaded.choice.kv_cache_dtype, loaded.kv_layout),
        kv_windows=list(plan.windows),
        step_time=None if scheduler_config.step_time is None else asdict(scheduler_config.step_time),
        speculative_config=None if config.speculative is None else asdict(config.speculative),
        row_time=None if scheduler_config.row_time is None else scheduler_config.row_time.to_list(),
    )


def _read_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that every step reads: the matrices of all layers and of the LM head."""
    return step_weight_bytes(loaded.config, loaded.choice.memory(loaded.device.type), loaded.formats)


def _log_startup_summary(
    config: EngineConfig, loaded: LoadedModel, scheduler_config: SchedulerConfig, plan: KVCachePlan
) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    memory = loaded.choice.memory(loaded.device.type)
    activations = plan_activations(loaded.config, memory, scheduler_config, plan.block_size, loaded.kv_layout)
    for line in startup_summary(
        config, scheduler_config, plan, loaded.planned_weights, activations, parameter_bytes(loaded.model)
    ):
        logger.info(line)


def _log_step_times(limits: SchedulerConfig, draft: LoadedModel | None, draft_kv_bytes: int) -> None:
    """Log the measured times of steps, and the memory of the draft model."""
    if limits.step_time is not None:
        logger.info("%s", describe_chunks(limits.step_time, limits.max_num_batched_tokens, limits.max_model_len))
    if limits.row_time is not None:
        logger.info("%s", describe_rows("speculative decoding", limits.row_time))
    if draft is not None and limits.draft_row_time is not None:
        logger.info(
            f"draft model {draft.name}: weights {format_memory(parameter_bytes(draft.model))}; its K and V take "
            f"{format_memory(draft_kv_bytes)} of the pool"
        )
        logger.info("%s", describe_rows("draft model", limits.draft_row_time))


def _log_sampling_defaults(loaded: LoadedModel) -> None:
    if values := loaded.sampling_defaults.values():
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        logger.info("default sampling parameters of this model: %s (see --generation-config)", shown)
