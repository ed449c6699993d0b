"""Prepares the engine of a decoder: KV pool, measured time of steps, prefix cache and model runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core.factory import make_kv_cache_manager
from chairlift.core.kv.kv_groups import FULL
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.startup.disk_prefix_cache import kv_caches, open_block_stores
from chairlift.engine.startup.loaded_model import LoadedDecoder, load_decoder
from chairlift.engine.startup.memory_plan import draft_config
from chairlift.engine.startup.pool_plan import (
    CacheSizes,
    beam_search_problem,
    default_memory_bytes,
    kv_slot_bytes,
    plan_layout,
    plan_pool,
    planned_pool,
    swap_bytes_in,
)
from chairlift.engine.startup.pooling_options import with_pooled_prefixes
from chairlift.engine.startup.prepared_engine import PreparedEngine
from chairlift.engine.startup.startup_log import describe_decoder
from chairlift.engine.startup.token_budget import PROBES, ChunkTimer, fastest_round, measure_rows, measure_steps
from chairlift.errors import ConfigError
from chairlift.kernels.kernel_set import find_kernel_set
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.decoder import DecoderModel, StepPlan
from chairlift.models.kv_layout import KVLayout
from chairlift.models.pooling import PoolingConfig
from chairlift.step_time import RowTime, StepTime
from chairlift.system.memory_amounts import format_memory
from chairlift.worker.adapter_slots import AdapterSlots
from chairlift.worker.block_copier import BlockCopier
from chairlift.worker.decode_graphs import StepCapture, find_capture, with_decode_graphs
from chairlift.worker.draft_model import DraftHead, DraftModel
from chairlift.worker.model_runner import ModelRunner
from chairlift.worker.pooling import Pooling
from chairlift.worker.prompt_logprobs import PromptLogprobs
from chairlift.worker.request_rows import RequestRows
from chairlift.worker.runner_model import RunnerModel
from chairlift.worker.sampler import Sampler
from chairlift.worker.step_extension import DraftProposer, StepExtension

logger = logging.getLogger("chairlift")

StepTurn = AbstractContextManager[None]
"""Is held while a step is measured."""


def prepare_decoder(config: EngineConfig, loaded: LoadedDecoder, turn: StepTurn | None) -> PreparedEngine:
    """Plan and allocate KV memory, measure the time of steps, and make the model runner.

    Raises:
        ModelLoadError: the draft model cannot be found, read or run.
        ConfigError: this model or this machine cannot satisfy an option.
    """
    config = with_pooled_prefixes(config, loaded.config, loaded.pooling)
    layout = plan_layout(config, loaded.config)
    draft = _provide_draft_model(config, loaded, layout)
    sizes = CacheSizes.of_model(loaded.config, loaded.choice.kv_cache_dtype, layout)
    if draft is not None:
        sizes = sizes.with_draft(draft.config, draft.choice.kv_cache_dtype)
    plan = plan_pool(config, sizes, default_memory_bytes(loaded.device) - swap_bytes_in(config, loaded.device.type))
    pool = planned_pool(config, sizes.context, plan)
    loaded.provide_kv_cache(plan, layout)
    if draft is not None:
        draft.provide_kv_cache(replace(plan, num_checkpoints=0), KVLayout.one_group(draft.config))
    limits = _measured_limits(config, loaded, draft, plan, pool.max_model_len, turn)
    block_stores = open_block_stores(config, loaded, plan, limits.step_time)
    capture = find_capture(loaded.choice.kernels, loaded.device)
    if capture is not None:
        _compile_kernels(loaded, limits.max_model_len, plan, turn)
    return PreparedEngine(
        limits=limits,
        kv_cache_plan=plan,
        manager=make_kv_cache_manager(
            pool, config.has_prefix_cache, block_stores, record_index_changes=config.enable_kv_cache_events
        ),
        runner=_make_runner(
            loaded,
            limits.max_num_seqs,
            limits.max_model_len,
            plan,
            draft,
            _make_block_copier(config, loaded, plan),
            None if capture is None or config.enforce_eager else partial(_with_graphs, loaded, capture, turn),
        ),
        max_request_slots=pool.max_request_slots,
        describe=lambda: describe_decoder(pool, limits, plan, loaded, draft, sizes.draft_slot_bytes),
        has_prefix_cache=config.has_prefix_cache,
        token_bytes=kv_slot_bytes(loaded.config, loaded.choice.kv_cache_dtype),
        slot_bytes=sizes.slot_bytes,
        block_stores=block_stores,
    )


def _provide_draft_model(config: EngineConfig, loaded: LoadedDecoder, layout: KVLayout) -> LoadedDecoder | None:
    """The draft model that `config.speculative_config` names, which is loaded once for each loaded model; None if there
    is none.

    Raises:
        ModelLoadError: the draft model cannot be found, read or run.
        ConfigError: it does not fit the model.
    """
    speculative = config.speculative
    if speculative is None or speculative.model is None:
        return None
    if layout.windows != FULL:
        raise ConfigError(
            "speculative_config: a draft model needs K and V of all tokens, and this model releases those that left a "
            "sliding window: set disable_hybrid_kv_cache_manager, or use method=ngram"
        )
    draft, needed = loaded.draft, (speculative.model, speculative.quantization)
    if draft is None or (draft.engine_config.model, draft.engine_config.quantization) != needed:
        draft = load_decoder(draft_config(config, speculative))
    _check_draft(draft, loaded, config.max_model_len or loaded.config.max_position_embeddings)
    loaded.draft = draft
    return draft


def _check_draft(draft: LoadedDecoder, loaded: LoadedDecoder, max_model_len: int) -> None:
    """Check that token ids of the draft model mean the same in the model, and that its context is long enough."""
    ours, theirs = draft.tokenizer, loaded.tokenizer
    problem = None
    if draft.config.vocab_size != loaded.config.vocab_size:
        problem = f"it has {draft.config.vocab_size} tokens, and {loaded.name} has {loaded.config.vocab_size}"
    elif (
        isinstance(ours, Tokenizer)
        and isinstance(theirs, Tokenizer)
        and not ours.has_vocabulary_of(theirs, loaded.config.vocab_size)
    ):
        problem = f"its tokenizer differs from that of {loaded.name}"
    elif (context := draft.config.max_position_embeddings) < max_model_len:
        problem = f"its context has {context} tokens, fewer than the {max_model_len} of a request: lower max_model_len"
    if problem is not None:
        raise ConfigError(
            f"speculative_config: {draft.name} cannot be the draft model, because {problem}: use a smaller model of "
            "the same family, or method=ngram"
        )


def _measured_limits(
    config: EngineConfig,
    loaded: LoadedDecoder,
    draft: LoadedDecoder | None,
    plan: KVCachePlan,
    max_model_len: int,
    turn: StepTurn | None,
) -> SchedulerConfig:
    """The limits of the scheduler, with the measured time of steps."""

    def timer(model: LoadedDecoder) -> ChunkTimer:
        return _timer_of(_make_runner(model, 1, max_model_len, plan), max_model_len, plan, turn)

    limits = config.scheduler_config(
        max_model_len,
        step_time=measured_step_time(config, loaded, timer),
        row_time=None if config.speculative is None else measured_row_time(loaded, timer, plan),
        draft_row_time=None if draft is None else measured_row_time(draft, timer, plan),
    )
    if loaded.model.predictor is not None:
        if loaded.predictor_row_time is None:
            rows = RequestRows(1, max_model_len, plan.block_size, loaded.device)
            sampling = find_kernel_set(loaded.choice.kernels).make_sampling()
            sampler = Sampler.of_rows(rows, loaded.config.vocab_size, sampling)
            alone = ModelRunner(PredictorAlone(loaded.model), rows, sampler)
            each = _timer_of(alone, max_model_len, plan, turn)
            loaded.predictor_row_time = measure_rows(each.sampled_seconds_of, each.longest)
        limits = replace(limits, draft_row_time=loaded.predictor_row_time)
    return limits if loaded.pooling is None else replace(limits, is_pooling=True)


def _timer_of(runner: ModelRunner, max_model_len: int, plan: KVCachePlan, turn: StepTurn | None) -> ChunkTimer:
    return ChunkTimer(runner, max_model_len, plan.block_size, plan.num_blocks, len(plan.windows), turn)


def _compile_kernels(loaded: LoadedDecoder, max_model_len: int, plan: KVCachePlan, turn: StepTurn | None) -> None:
    """Run steps of few and of many tokens, so that no request waits until their kernels are compiled."""
    timer = _timer_of(_make_runner(loaded, 1, max_model_len, plan), max_model_len, plan, turn)
    sizes = sorted({min(probe, timer.longest) for probe in PROBES})
    seconds = sum(timer.seconds_of(size, 0) for size in sizes) + timer.sampled_seconds_of(1, 0)
    logger.info("compiled kernels, or loaded them from the cache of Triton, in %.1f s", seconds)


def measured_step_time(
    config: EngineConfig, loaded: LoadedDecoder, make_timer: Callable[[LoadedDecoder], ChunkTimer]
) -> StepTime | None:
    """The measured time of steps, which limits chunks; None if the token budget is configured or has a fixed default.

    Static batches do not stream tokens, so their steps need not be short.
    """
    is_chosen = config.max_num_batched_tokens is None and config.batching == "continuous"
    if not is_chosen or loaded.choice.kernels != "native":
        return None
    if loaded.step_time is None:
        timer = make_timer(loaded)
        loaded.step_time = fastest_round(partial(measure_steps, timer.seconds_of, timer.longest))
    return loaded.step_time


def measured_row_time(
    loaded: LoadedDecoder, make_timer: Callable[[LoadedDecoder], ChunkTimer], plan: KVCachePlan
) -> RowTime | None:
    """The measured time of steps by their number of sampled rows."""
    if loaded.row_time is None:
        timer = make_timer(loaded)
        max_rows = 1 + plan.num_draft_states if plan.num_states else None
        loaded.row_time = measure_rows(timer.sampled_seconds_of, timer.longest, max_rows)
    return loaded.row_time


def _make_block_copier(config: EngineConfig, loaded: LoadedDecoder, plan: KVCachePlan) -> BlockCopier | None:
    """Allocate the swap space of a plan; None if no blocks are copied.

    Raises:
        ConfigError: the memory cannot be allocated.
    """
    if beam_search_problem(config, plan) is not None and not plan.num_swap_blocks:
        return None
    try:
        return BlockCopier(kv_caches(loaded), plan.num_swap_blocks)
    except RuntimeError as error:
        raise ConfigError(
            f"the swap space of {format_memory(plan.swap_bytes)} cannot be allocated: lower swap_space ({error})"
        ) from None


def _make_runner(
    loaded: LoadedDecoder,
    max_num_seqs: int,
    max_model_len: int,
    plan: KVCachePlan,
    draft: LoadedDecoder | None = None,
    block_copier: BlockCopier | None = None,
    replace_model: Callable[[RequestRows], RunnerModel] | None = None,
) -> ModelRunner:
    num_groups, size = len(plan.windows), plan.block_size
    rows = RequestRows(max_num_seqs, max_model_len, size, loaded.device, num_groups, plan.num_draft_states)
    extensions: list[StepExtension] = [] if block_copier is None else [block_copier]
    if loaded.lora is not None:
        extensions.append(AdapterSlots(loaded.lora, rows))
    if loaded.pooling is not None:
        extensions.append(Pooling(_pooled_values(loaded, loaded.pooling), loaded.row_functions()))
        return ModelRunner(loaded.model, rows, None, extensions, has_states=has_states(loaded))
    sampling = find_kernel_set(loaded.choice.kernels).make_sampling()
    sampler = Sampler.of_rows(rows, loaded.config.vocab_size, sampling, loaded.grammars)
    extensions.append(PromptLogprobs(loaded.model, rows, sampler))
    proposer = _make_proposer(loaded, draft, rows, sampler)
    model = loaded.model if replace_model is None or proposer is not None else replace_model(rows)
    return ModelRunner(model, rows, sampler, extensions, proposer, has_states(loaded))


def _with_graphs(loaded: LoadedDecoder, capture: StepCapture, turn: StepTurn | None, rows: RequestRows) -> RunnerModel:
    """The model with captured decode steps, if they can be captured."""
    if loaded.model.waits_for_host:
        logger.warning("Decode steps run without CUDA graphs, because experts in several formats wait for the host")
        return loaded.model
    with turn or nullcontext():
        return with_decode_graphs(loaded.model, rows, has_states(loaded), capture)


def _make_proposer(
    loaded: LoadedDecoder, draft: LoadedDecoder | None, rows: RequestRows, sampler: Sampler
) -> DraftProposer | None:
    """The predictor of the model, or the draft model; None if there is neither."""
    if loaded.model.predictor is not None:
        return DraftHead(loaded.model, sampler.choose, rows)
    return None if draft is None else DraftModel(draft.model, sampler.choose, rows, has_states(draft))


def has_states(loaded: LoadedDecoder) -> bool:
    """Whether the model has layers with recurrent state."""
    return loaded.config.state_values_per_sequence > 0


class PredictorAlone:
    """A `RunnerModel` that computes the predictor of a model from hidden states of zeros, to measure its time."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self.plan, self.logits = model.plan, model.predicted_logits

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        hidden = torch.zeros((len(token_ids), self._model.config.hidden_size), device=token_ids.device)
        return self._model.predict(token_ids, positions, hidden, plan)


def _pooled_values(loaded: LoadedDecoder, pooling: PoolingConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of hidden states whose values are pooled: states after the final norm, or numbers that become
    scores."""
    if pooling.classifier_tokens is None:
        return loaded.model.final_hidden
    negative, positive = pooling.classifier_tokens

    def numbers(hidden: torch.Tensor) -> torch.Tensor:
        logits = loaded.model.logits(hidden)
        return logits[:, [positive]] - (0.0 if negative is None else logits[:, [negative]])

    return numbers
