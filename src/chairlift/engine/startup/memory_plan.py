"""The plan of an engine's memory: weights, activations of the largest step, and the KV pool.

A plan is made before a model is loaded, from its declaration and the formats in its files. The memory of the process
(interpreter, libraries, a CUDA context) is not included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core.baselines.arena import ARENAS
from chairlift.core.baselines.selection import KVPool
from chairlift.core.kv.kv_cache_manager import FULL
from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.core.kv.windowed_groups import KVGroups
from chairlift.errors import ConfigError
from chairlift.kernels.choice import KernelChoice, choose_kernels
from chairlift.kernels.kernel_memory import (
    DTYPE_BYTES,
    SPARE_BLOCKS,
    KernelMemory,
    LayerSizes,
    MemoryItem,
    NetworkSizes,
    RecurrenceSizes,
    StepSizes,
    StoredMatrix,
    join_terms,
    total,
    value_item,
)
from chairlift.models.declaration import (
    EMBEDDING,
    LM_HEAD,
    FeedForwardSpec,
    LayerSpec,
    MatrixSpec,
    ModelConfig,
    RecurrenceSpec,
)
from chairlift.models.kv_layout import KVLayout
from chairlift.speculative_config import SpeculativeConfig
from chairlift.worker.kv_cache_plan import KVCachePlan
from chairlift.worker.memory import PROMPT_LOGPROB_ROWS, format_memory

MatrixFormats = Callable[[str], str]
"""Maps the name of a parameter to its format in the file, as in `PackedRows.format`."""

KV_DTYPE_BYTES: Final = {**DTYPE_BYTES, "int8": 1}

INT8_SCALE_BYTES: Final = 8
"""One float32 scale for the key and one for the value of each token and KV head."""

ENCODER_TOKENS: Final = 2048
"""The default token budget of an encoder, unless a text may be longer. More tokens in a step are not faster."""

MAX_CHECKPOINT_INTERVAL: Final = 1024
"""Maximum number of tokens between the checkpoints of a long sequence."""

PREDICTOR_ROWS: Final = 6
"""Rows of hidden_size values that the predictor of a model needs for each token, beside those of its layer."""

NO_POOL: Final = KVCachePlan(0, 1, 0, "demand")
"""The pool of an encoder, which keeps no K and V."""

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


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The planned memory of an engine.

    Attributes:
        limits: limits of the step that the activations are planned for.
        layout: the groups of layers with block tables of their own.
        weights, activations: the items of each kind.
        token_bytes: bytes of K and V of one token in all layers.
        slot_bytes: the same in the layers of one group, and in the draft model.
        memory_bytes: memory of the engine; None if the size of the pool is given.
        free_share: share of the memory left by weights and activations that K and V get.
        kv_bytes: memory for the pool; None if it is given in blocks.
        max_model_len: as the engine resolves it.
    """

    choice: KernelChoice
    limits: SchedulerConfig
    layout: KVLayout
    weights: list[MemoryItem]
    activations: list[MemoryItem]
    token_bytes: int
    slot_bytes: int
    memory_bytes: int | None
    free_share: float
    kv_bytes: int | None
    pool: KVCachePlan
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A draft model whose memory is planned with that of a model.

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
        formats: the formats of the matrices in the model's file, see `loading.resolve.matrix_formats`.
        memory_bytes: memory for weights, activations, K and V together. It is required unless `config` has the size of
            the pool.
        free_share: share of the memory left by weights and activations that K and V get.
        budget: a description of `memory_bytes` for messages; None for "memory=24 GiB".
        is_pooling: whether the model computes vectors or scores.
        draft: the draft model, whose K and V and states are in the same pool; None if there is none.

    Raises:
        ConfigError: the memory is too small, or an option cannot be honoured. The message has the arithmetic.
    """
    context = model_config.max_position_embeddings
    choice = choose_kernels(config, model_config.dtype, is_pooling=is_pooling)
    memory = choice.memory(config.device.split(":")[0])
    limits = config.scheduler_config(min(config.max_model_len or context, context))
    if model_config.encoder is not None:
        limits = replace(limits, max_num_batched_tokens=encoder_token_budget(config, limits.max_model_len))
    layout = plan_layout(config, model_config)
    weights = plan_weights(model_config, memory, formats) + plan_lora(model_config, config, choice.dtype)
    activations = plan_activations(model_config, memory, limits, config.block_size, layout)
    slot_bytes, draft_state_bytes = kv_slot_bytes(model_config, choice.kv_cache_dtype, layout), 0
    if draft is not None:
        other = choose_kernels(draft.config, draft.model_config.dtype)
        kernels = other.memory(draft.config.device.split(":")[0])
        weights += plan_weights(draft.model_config, kernels, draft.formats)
        activations += plan_activations(draft.model_config, kernels, limits, config.block_size)
        slot_bytes += kv_slot_bytes(draft.model_config, other.kv_cache_dtype)
        draft_state_bytes = sequence_state_bytes(draft.model_config)
    kv_bytes = config.kv_cache_memory_bytes
    if model_config.encoder is None and config.num_kv_blocks is None and kv_bytes is None:
        kv_bytes = _left_for_kv(memory_bytes, total(weights), total(activations), free_share, budget)
        if (kv_bytes := kv_bytes - swap_bytes_in(config, config.device.split(":")[0])) <= 0:
            raise ConfigError(
                f"the swap space of {format_memory(config.swap_bytes)} leaves nothing for K and V: lower swap_space, "
                "or set preemption_mode=recompute"
            )
    pool, max_model_len = NO_POOL, limits.max_model_len
    if model_config.encoder is None:
        states = sequence_state_bytes(model_config), draft_state_bytes
        pool = plan_pool_with_states(config, slot_bytes, context, kv_bytes or 0, layout.windows, *states)
        pool = plan_swap_space(config, pool, model_config.name)
        max_model_len = planned_pool(config, context, pool.num_blocks, pool.windows).max_model_len
    return MemoryPlan(
        choice=choice,
        limits=limits,
        layout=layout,
        weights=weights,
        activations=activations,
        token_bytes=kv_slot_bytes(model_config, choice.kv_cache_dtype),
        slot_bytes=slot_bytes,
        memory_bytes=memory_bytes,
        free_share=free_share,
        kv_bytes=kv_bytes,
        pool=pool,
        max_model_len=max_model_len,
    )


def _left_for_kv(
    memory_bytes: int | None, weights: int, activations: int, free_share: float, budget: str | None
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
    return left


# -- weights ---------------------------------------------------------------------------------------------------------


def plan_weights(config: ModelConfig, memory: KernelMemory, formats: MatrixFormats) -> list[MemoryItem]:
    """Plan the weights of a loaded model to the byte."""
    groups: dict[str, Counter[StoredMatrix]] = {}
    for matrix in config.matrices:
        groups.setdefault(matrix.group, Counter()).update(_stored(matrix, memory, formats))
    if config.tie_word_embeddings:
        table = groups.pop(EMBEDDING)
        groups[EMBEDDING if memory.copies_tied_table else f"{EMBEDDING} and {LM_HEAD}"] = table
        if memory.copies_tied_table:
            groups[f"{LM_HEAD}, packed copy of the {EMBEDDING}"] = table
    if config.predictor is not None and memory.copies_tied_table:
        head = _stored(config.head_product.matrix, memory, formats)
        groups[f"{LM_HEAD}, packed copy for the predictor"] = Counter(head)
    return [
        *(_matrices(group, stored) for group, stored in groups.items()),
        *_small_values(config, memory.value_bytes),
        *_rotary_tables(config),
    ]


def step_weight_bytes(config: ModelConfig, memory: KernelMemory, formats: MatrixFormats) -> int:
    """Bytes of the matrices that a step reads, which are all except an untied embedding table.

    A step with few tokens reads a part of the experts.
    """
    return sum(stored.num_bytes for matrix in config.read_matrices for stored in _stored(matrix, memory, formats))


def file_parts(matrix: MatrixSpec, formats: MatrixFormats) -> list[tuple[str, int]]:
    """The (format in the file, out_features) of the matrices of a product."""
    return [(formats(f"{name}.weight"), out) for name, out in matrix.parts]


def _stored(matrix: MatrixSpec, memory: KernelMemory, formats: MatrixFormats) -> list[StoredMatrix]:
    return memory.weights(file_parts(matrix, formats), matrix.in_features, matrix.keeps_format)


def _matrices(name: str, stored: Counter[StoredMatrix]) -> MemoryItem:
    terms = (each.formula if count == 1 else f"{count} x {each.formula}" for each, count in stored.items())
    return MemoryItem(name, " + ".join(terms), sum(count * each.num_bytes for each, count in stored.items()))


def _small_values(config: ModelConfig, size: int) -> list[MemoryItem]:
    """All parameters that are not matrices, in values of `size` bytes, without rotary tables."""
    layers = Counter(layer.num_values_beside_matrices for layer in config.all_layers)
    count = sum(number * small for small, number in layers.items())
    formula = join_terms(f"{number} x {small:,}" for small, number in layers.items())
    items = [value_item("norms and biases", formula, count, size)]
    table, norm, inputs = config.positions, config.final_norm, config.per_layer_inputs
    if inputs is not None:
        items.append(value_item("norm of per-layer inputs", f"{inputs.size:,}", inputs.norm.num_values, size))
    if table is not None:
        items.append(value_item("positions", f"{table.rows:,} x {table.size:,}", table.num_values, size))
    if (encoder := config.encoder) is not None:
        types = encoder.token_types
        count = encoder.embedding_norm.num_values + (0 if types is None else types.num_values)
        items.append(value_item("token types and norm of embeddings", f"{count:,}", count, size))
    if norm is not None:
        items.append(value_item("final norm", f"{norm.num_values:,}", norm.num_values, size))
    if config.predictor is not None:
        # The predictor reads hidden states after the final norm, which the head applies by itself.
        norms = [each.num_values for each in (*config.predictor.norms, norm) if each is not None]
        items.append(value_item("norms of the predictor", join_terms(map(str, norms)), sum(norms), size))
    return items


def _rotary_tables(config: ModelConfig) -> list[MemoryItem]:
    """Cosines, sines and query scales of all positions, in one table for each rotary embedding."""
    positions = config.max_position_embeddings
    sizes = [rope.num_dims(head_dim) + rope.scales_queries for rope, head_dim in config.ropes]
    if not sizes:
        return []
    formula = f"{positions:,} x {join_terms(str(size) for size in sizes)}"
    return [
        value_item(
            "rotary table, float32" if len(sizes) == 1 else "rotary tables, float32", formula, positions * sum(sizes), 4
        )
    ]


def plan_lora(model_config: ModelConfig, config: EngineConfig, dtype: str) -> list[MemoryItem]:
    """Plan the matrices of LoRA adapters, all of the largest rank, in values of `dtype`."""
    if not config.num_loras:
        return []
    matrices = [matrix for layer in model_config.layers for matrix in layer.adaptable]
    rows = sum(matrix.in_features + out for matrix in matrices for _, out in matrix.parts)
    formula = f"{config.num_loras} adapters x rank {config.max_lora_rank} x {rows:,}"
    return [value_item("LoRA adapters", formula, config.num_loras * config.max_lora_rank * rows, DTYPE_BYTES[dtype])]


# -- activations -----------------------------------------------------------------------------------------------------


def plan_activations(
    config: ModelConfig, memory: KernelMemory, limits: SchedulerConfig, block_size: int, layout: KVLayout | None = None
) -> list[MemoryItem]:
    """Plan an upper bound of the memory of the largest step, without weights, K and V.

    The kernel set plans the layers. Beside them are the per-layer inputs, T (4 L + 1) P values with P inputs for each
    of L layers and T tokens; the logits of sampled rows, or of prompt logprobs if they need more; and token ids, block
    tables of each group of layers, and penalties of every seat.
    """
    layout = layout or KVLayout.one_group(config)
    return [
        *memory.step(_step_sizes(config, limits, block_size, layout)),
        *_per_layer_rows(config, limits.max_num_batched_tokens, memory.value_bytes),
        *_predictor_rows(config, limits, memory.value_bytes),
        _plan_logits(config, limits, memory),
        _plan_request_rows(limits, block_size, len(layout.windows)),
    ]


def _step_sizes(config: ModelConfig, limits: SchedulerConfig, block_size: int, layout: KVLayout) -> StepSizes:
    groups = {index: group for group, indices in enumerate(layout.layers) for index in indices}
    branches = (branch for layer in config.layers for branch in (*layer.feed_forwards, layer.per_layer_branch))
    return StepSizes(
        num_tokens=limits.max_num_batched_tokens,
        num_seqs=limits.max_num_seqs,
        length=-(-limits.max_model_len // block_size) * block_size,
        block_size=block_size,
        hidden_size=config.hidden_size,
        is_fused=all(layer.is_fused for layer in config.layers),
        row_kernels=frozenset(branch.activation_kernel for branch in branches if branch is not None),
        layers=tuple(_layer_sizes(layer, groups.get(index, 0)) for index, layer in enumerate(config.layers)),
    )


def _layer_sizes(layer: LayerSpec, group: int) -> LayerSizes:
    networks = tuple(_network_sizes(network) for network in layer.feed_forwards)
    recurrence = None if layer.recurrence is None else _recurrence_sizes(layer.recurrence)
    if (spec := layer.attention) is None:
        return LayerSizes(group, 0, 0, 0, 1.0, None, False, True, networks, recurrence)
    return LayerSizes(
        group=group,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        sliding_window=spec.sliding_window,
        is_rotated=spec.rope is not None,
        has_plain_softmax=spec.logits_soft_cap is None and spec.sinks is None,
        networks=networks,
        recurrence=recurrence,
    )


def _recurrence_sizes(spec: RecurrenceSpec) -> RecurrenceSizes:
    return RecurrenceSizes(
        spec.input.out_features,
        spec.output.in_features,
        spec.convolution.channels,
        0 if spec.rule is None else spec.rule.num_heads,
        spec.state_values,
    )


def _network_sizes(network: FeedForwardSpec) -> NetworkSizes:
    if (router := network.router) is None:
        return NetworkSizes(network.inner_size, network.gated)
    return NetworkSizes(network.inner_size, network.gated, router.num_experts, router.routing.experts_per_token)


def _per_layer_rows(config: ModelConfig, tokens: int, size: int) -> Iterator[MemoryItem]:
    """The inputs of all layers, with one unused input, and while they are computed their projection, its norm and the
    rows of the table."""
    if (inputs := config.per_layer_inputs) is not None:
        layers = config.num_layers
        formula = f"{tokens:,} x (4 x {layers} + 1) x {inputs.size}"
        yield value_item("per-layer inputs", formula, tokens * (4 * layers + 1) * inputs.size, size)


def _predictor_rows(config: ModelConfig, limits: SchedulerConfig, size: int) -> Iterator[MemoryItem]:
    """The rows of the predictor beside those of its layer: hidden states before and after their norm, embeddings, both
    side by side, and the projection of these; and the last hidden state of each request."""
    if config.predictor is not None:
        rows, hidden = PREDICTOR_ROWS * limits.max_num_batched_tokens + limits.max_num_seqs, config.hidden_size
        formula = f"({PREDICTOR_ROWS} x {limits.max_num_batched_tokens:,} + {limits.max_num_seqs:,}) x {hidden:,}"
        yield value_item("predictor", formula, rows * hidden, size)


def _plan_logits(config: ModelConfig, limits: SchedulerConfig, memory: KernelMemory) -> MemoryItem:
    kinds = (
        ("logits and sampling", limits.max_logit_rows, memory.logit_bytes),
        (
            "logits: prompt logprobs",
            min(PROMPT_LOGPROB_ROWS, limits.max_num_batched_tokens),
            memory.prompt_logit_bytes,
        ),
    )
    vocab = config.vocab_size
    items = [MemoryItem(name, f"{rows} x {vocab:,} x {size} bytes", rows * vocab * size) for name, rows, size in kinds]
    return max(items, key=lambda item: item.num_bytes)


def _plan_request_rows(limits: SchedulerConfig, block_size: int, num_groups: int) -> MemoryItem:
    """The request rows: int32 token ids and block tables, and index arrays of penalties (48 bytes a token)."""
    seqs, length = limits.max_num_seqs, limits.max_model_len
    blocks = -(-length // block_size)
    formula = f"{seqs:,} x ({length:,} x (4 + 48) + {num_groups} x {blocks:,} x 4) bytes"
    return MemoryItem("request rows and penalties", formula, seqs * (length * 52 + num_groups * blocks * 4))


# -- K and V ---------------------------------------------------------------------------------------------------------


def kv_slot_bytes(config: ModelConfig, kv_cache_dtype: str, layout: KVLayout | None = None) -> int:
    """Bytes of K and V of one token, with scales, in the layers of one group of `layout`, or in all layers.

    Args:
        kv_cache_dtype: a key of KV_DTYPE_BYTES.
    """
    specs = (layout or KVLayout.one_group(config)).positions(config)
    scales = INT8_SCALE_BYTES * sum(spec.num_kept_kv_heads for spec in specs) if kv_cache_dtype == "int8" else 0
    return sum(2 * spec.num_kept_kv_heads * spec.head_dim for spec in specs) * KV_DTYPE_BYTES[kv_cache_dtype] + scales


def sequence_state_bytes(config: ModelConfig) -> int:
    """Bytes of the recurrent state of one sequence in all layers; 0 if the model has no recurrent layers."""
    return config.state_values_per_sequence * DTYPE_BYTES["float32"]


def checkpoint_plan(plan: KVCachePlan) -> CheckpointPlan | None:
    """The checkpoints of a planned pool; None if the model has no recurrent layers."""
    return CheckpointPlan(plan.num_checkpoints, plan.checkpoint_interval) if plan.state_bytes else None


def encoder_token_budget(config: EngineConfig, max_model_len: int) -> int:
    """The token budget of a step of an encoder, which computes each text in one step."""
    return config.max_num_batched_tokens or max(ENCODER_TOKENS, max_model_len, config.max_num_seqs)


def plan_layout(config: EngineConfig, model_config: ModelConfig) -> KVLayout:
    """The groups of layers that have block tables of their own.

    Reservations have one group, because they never release a slot before their request has finished. Models with
    recurrent layers have one, because a prefix of theirs is shared only at a checkpoint. The groups do not depend on
    `max_model_len`, so a number of blocks is the same memory whatever its value is.
    """
    has_one_table = config.kv != "paged" or config.disable_hybrid_kv_cache_manager
    if has_one_table or model_config.state_values_per_sequence:
        return KVLayout.one_group(model_config)
    return KVLayout.by_window(model_config, model_config.max_position_embeddings)


def plan_pool(
    config: EngineConfig,
    slot_bytes: int,
    context: int,
    memory_bytes: int,
    windows: tuple[int | None, ...] = FULL,
) -> KVCachePlan:
    """Plan the pool: `num_kv_blocks`, or the blocks that fit in `kv_cache_memory_bytes`, or else in `memory_bytes`, but
    no more than `max_num_seqs` sequences of full length can use.

    Args:
        slot_bytes: bytes of K and V of one token in the layers of one group.
        context: the model's maximum number of tokens.
        windows: the window of each group of layers.

    Raises:
        ConfigError: the budget does not hold one sequence of `max_model_len` tokens; or one block, if `max_model_len`
            is None, because the caller then lowers it to the size of the pool.
    """
    block_size, max_model_len = config.block_size, config.max_model_len
    block_bytes = slot_bytes * block_size
    if config.num_kv_blocks is not None:
        return KVCachePlan(config.num_kv_blocks, block_size, block_bytes, "num_kv_blocks", windows)
    rounded = int if config.kv == "paged" else ARENAS[config.kv_arena](1).rounded_size
    groups = KVGroups(windows, block_size, config.largest_token_budget)
    memory_bytes = config.kv_cache_memory_bytes or memory_bytes
    affordable = max(0, memory_bytes // block_bytes - SPARE_BLOCKS)
    blocks_per_seq = rounded(sum(groups.most_blocks(max_model_len or context)))
    needed = len(windows) if max_model_len is None else blocks_per_seq
    if affordable >= needed:
        usable = config.max_num_seqs * blocks_per_seq
        limited_by = "memory" if affordable < usable else "demand"
        return KVCachePlan(min(affordable, usable), block_size, block_bytes, limited_by, windows)
    spare = f"and {SPARE_BLOCKS} spare block, each of {block_size} slots and {format_memory(block_bytes)}"
    budget = f"the KV memory budget of {format_memory(memory_bytes)} holds {affordable} blocks ({spare})"
    required = f"set kv_cache_memory_bytes to at least {format_memory((needed + SPARE_BLOCKS) * block_bytes)}"
    if max_model_len is None or not affordable:
        raise ConfigError(f"{budget}, but {needed} are needed: {required}, or lower block_size")
    whole = next((blocks for blocks in range(affordable, 0, -1) if rounded(blocks) <= affordable), 0)
    longest = groups.max_tokens(whole, max_model_len)
    raise ConfigError(
        f"{budget}, at most {longest} tokens for one request, but max_model_len={max_model_len} needs {needed} blocks: "
        f"{required}, or max_model_len to at most {longest}"
    )


def plan_pool_with_states(
    config: EngineConfig,
    slot_bytes: int,
    context: int,
    memory_bytes: int,
    windows: tuple[int | None, ...],
    state_bytes: int,
    draft_model_state_bytes: int = 0,
) -> KVCachePlan:
    """Plan the pool as `plan_pool`, and the recurrent states of running requests and of checkpoints beside it.

    The budget is that of K and V and of states. A cache full of long prefixes has as many bytes of K and V as of
    checkpoints (see `checkpoint_interval`), so each gets half of what running requests leave. These have a state each,
    and one for each draft token of a step.

    Args:
        state_bytes: bytes of the recurrent state of one sequence; 0 for a model without recurrent layers.
        draft_model_state_bytes: the same of the draft model.
    """
    each = state_bytes + draft_model_state_bytes
    if not each:
        return plan_pool(config, slot_bytes, context, memory_bytes, windows)
    num_drafts = 0 if config.speculative is None else config.scheduler_config(context).max_logit_rows - 1
    budget, running = config.kv_cache_memory_bytes or memory_bytes, (config.max_num_seqs + num_drafts) * each
    left, kept = share_with_states(budget - running, config, state_bytes)
    try:
        pool = plan_pool(replace(config, kv_cache_memory_bytes=None), slot_bytes, context, left, windows)
    except ConfigError:
        drafts = f" and of {num_drafts} draft tokens" if num_drafts else ""
        raise ConfigError(
            f"the budget of {format_memory(budget)} for K and V and recurrent states is too small: the states of "
            f"max_num_seqs={config.max_num_seqs} requests{drafts} take {format_memory(running)} "
            f"({format_memory(each)} each), checkpoints of prefixes {format_memory(kept)}, and "
            f"{format_memory(max(0, left))} are left for K and V, which does not hold one request of max_model_len "
            "tokens: lower max_num_seqs or max_model_len, or set a larger kv_cache_memory_bytes"
        ) from None
    num_checkpoints = 0
    if config.has_prefix_cache and state_bytes:
        # The blocks may need less than their half; a budget that the user has set is for checkpoints then.
        room = pool.num_blocks * pool.block_bytes if config.kv_cache_memory_bytes is None else kept
        num_checkpoints = max(1, min(pool.num_blocks, room // state_bytes))
    return replace(
        pool,
        state_bytes=state_bytes,
        num_states=config.max_num_seqs,
        num_draft_states=num_drafts,
        num_checkpoints=num_checkpoints,
        checkpoint_interval=checkpoint_interval(config.block_size, pool.block_bytes, state_bytes),
        draft_model_state_bytes=draft_model_state_bytes,
    )


def swap_bytes_in(config: EngineConfig, device: str) -> int:
    """The bytes of the swap space in the memory of the device: host memory is that of the CPU."""
    return config.swap_bytes if device == "cpu" else 0


def plan_swap_space(config: EngineConfig, pool: KVCachePlan, model: str) -> KVCachePlan:
    """The pool with as many blocks of swap space as its size in the configuration holds.

    Raises:
        ConfigError: it holds no block, or the model keeps more than K and V in one group of layers.
    """
    if config.preemption_mode != "swap":
        return pool
    problem = None
    if pool.state_bytes or pool.draft_model_state_bytes:
        problem = "has layers with recurrent state, which are not swapped: set preemption_mode=recompute"
    elif pool.windows != FULL:
        problem = "has layers with sliding windows: set preemption_mode=recompute, or disable_hybrid_kv_cache_manager"
    if problem is not None:
        raise ConfigError(f"preemption_mode=swap does not support {model!r}, because it {problem}")
    if config.swap_bytes < pool.block_bytes:
        raise ConfigError(
            f"swap_space={config.swap_bytes / (1 << 30):g} GiB does not hold a block, which takes "
            f"{format_memory(pool.block_bytes)}: raise swap_space, or set preemption_mode=recompute"
        )
    return replace(pool, num_swap_blocks=config.swap_bytes // pool.block_bytes)


def beam_search_problem(config: EngineConfig, pool: KVCachePlan) -> str | None:
    """Why an engine has no beam search, with what to do; None if it has."""
    if pool.state_bytes:
        return "the model has layers with recurrent state: leave use_beam_search out"
    if pool.windows != FULL:
        return "the model has layers with sliding windows: set --disable-hybrid-kv-cache-manager"
    conflicts = {
        f"--kv {config.kv}": config.kv != "paged",
        f"--batching {config.batching}": config.batching != "continuous",
        "--speculative-config": config.speculative is not None,
        "--prefix-cache-dir": config.prefix_cache_dir is not None,
    }
    return next((f"the engine runs with {name}: remove it" for name, is_given in conflicts.items() if is_given), None)


def share_with_states(left: int, config: EngineConfig, state_bytes: int) -> tuple[int, int]:
    """The bytes for K and V, and those for checkpoints: equal halves of the bytes that running requests leave, or no
    checkpoints without a prefix cache. The first number may be negative."""
    kept = max(left // 2, state_bytes) if config.has_prefix_cache and state_bytes else 0
    return left - kept, kept


def checkpoint_interval(block_size: int, block_bytes: int, state_bytes: int) -> int:
    """The tokens between the checkpoints of a long sequence: as many as have K and V of the size of a state.

    They are at most MAX_CHECKPOINT_INTERVAL, because the second request with a prefix computes up to so many again.
    """
    return block_size * max(1, min(-(-state_bytes // block_bytes), MAX_CHECKPOINT_INTERVAL // block_size))


def planned_pool(
    config: EngineConfig,
    context: int,
    num_blocks: int,
    windows: tuple[int | None, ...] = FULL,
    checkpoints: CheckpointPlan | None = None,
) -> KVPool:
    """The pool with the policy of `config`. The default of `max_model_len` is the smaller of the model's context and
    the slots that one request can hold.

    Raises:
        ConfigError: `max_model_len` exceeds one of them.
    """
    pool = KVPool(
        num_blocks,
        config.block_size,
        config.max_model_len or context,
        config.kv,
        config.kv_arena,
        windows,
        config.largest_token_budget,
        checkpoints,
    )
    max_slots = pool.max_request_slots
    if max_slots < 2:
        groups = KVGroups(windows, config.block_size, config.largest_token_budget)
        raise ConfigError(
            f"the KV pool of {num_blocks} blocks x {config.block_size} slots is too small for one request, because "
            f"each of {len(windows)} groups of layers needs blocks of its own: set num_kv_blocks to at least "
            f"{sum(groups.most_blocks(2))}"
        )
    if config.max_model_len is None:
        return replace(pool, max_model_len=min(context, max_slots))
    if config.max_model_len > context:
        raise ConfigError(f"max_model_len={config.max_model_len} exceeds the model's context of {context} tokens")
    if config.max_model_len > max_slots:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the {max_slots} tokens of one request that the KV pool of "
            f"{num_blocks} blocks x {config.block_size} can hold under kv={config.kv}{_groups_note(windows)}: lower "
            "max_model_len, or enlarge the pool"
        )
    return pool


def _groups_note(windows: tuple[int | None, ...]) -> str:
    if windows == FULL:
        return ""
    return (
        f", because each of {len(windows)} groups of layers needs blocks of its own, and those with a window also "
        "blocks for max_num_batched_tokens tokens"
    )
