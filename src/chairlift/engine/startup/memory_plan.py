"""Memory plan of the torch kernels: the exact size of the weights, and an upper bound of a step's activations.

A plan is a list of items, each with the formula of its size, so that it can be checked by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.config import SchedulerConfig
from chairlift.models.declaration import EMBEDDING, LM_HEAD, AttentionSpec, FeedForwardSpec, ModelConfig
from chairlift.models.kv_layout import KVLayout

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

KV_DTYPE_BYTES: Final = {**DTYPE_BYTES, "int8": 1}

INT8_SCALE_BYTES: Final = 8
"""One float32 scale for the key and one for the value of each token and KV head."""

PACKED_DTYPES: Final = ("float32", "bfloat16")
"""Types whose matrices the CPU kernels store in packed form."""

TILE_BYTES: Final = {"cpu": 1 << 22, "cuda": 1 << 29}
"""Bytes of K and V that one attention product of decodes gathers, as in `kernels.torch_plan`."""

LOGIT_BYTES: Final = 48
"""Maximum bytes for each sampled row and token of the vocabulary, without the logit in the model's type: float32 logits
(4); copies for logprobs (4), drawn rows (4) and filtered rows (4); a full sort (values 4, ids 8); its cumulative sum
and the sum before each token (8 + 8); penalty counts (4)."""

PROMPT_LOGPROB_ROWS: Final = 256
"""Number of rows for which prompt logprobs are computed at a time, as in `worker.model_runner`."""

PROMPT_LOGIT_BYTES: Final = 12
"""Bytes for each such row and token of the vocabulary, without the logit in the model's type: float32 logits (4),
log_softmax and ranks (8)."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of a memory plan: what takes the memory, how its size is computed, and the size in bytes."""

    name: str
    formula: str
    num_bytes: int


def total(items: Sequence[MemoryItem]) -> int:
    """The sum of the bytes of all items."""
    return sum(item.num_bytes for item in items)


def kv_slot_bytes(config: ModelConfig, kv_cache_dtype: str, layout: KVLayout | None = None) -> int:
    """Bytes of K and V of one token, with scales, in the layers of one group of `layout`, or in all layers.

    Args:
        kv_cache_dtype: a key of KV_DTYPE_BYTES.
    """
    specs = (layout or KVLayout.one_group(config.num_layers)).positions(config)
    scales = INT8_SCALE_BYTES * sum(spec.num_kept_kv_heads for spec in specs) if kv_cache_dtype == "int8" else 0
    return sum(2 * spec.num_kept_kv_heads * spec.head_dim for spec in specs) * KV_DTYPE_BYTES[kv_cache_dtype] + scales


# -- weights ---------------------------------------------------------------------------------------------------------


def plan_weights(config: ModelConfig, dtype: str, device: str, kernels: str = "torch") -> list[MemoryItem]:
    """Plan the weights of a loaded model: every parameter in the compute type, whatever the type in its file is.

    The CPU kernels store matrices in packed form only. An embedding table that is tied to the LM head is stored in both
    forms, because it is also read by rows.

    Args:
        dtype: a key of DTYPE_BYTES.
        device: "cpu" or "cuda".
    """
    size = DTYPE_BYTES[dtype]
    is_packed = device == "cpu" and kernels != "reference" and dtype in PACKED_DTYPES
    groups: dict[str, Counter[tuple[int, int]]] = {}
    for matrix in config.matrices:
        groups.setdefault(matrix.group, Counter())[matrix.out_features, matrix.in_features] += 1
    items = [_matrix_item(group, shapes, size) for group, shapes in groups.items()]
    if config.tie_word_embeddings and is_packed:
        table = Counter({(config.head.out_features, config.head.in_features): 1})
        items.append(_matrix_item(f"{LM_HEAD}, packed copy of the {EMBEDDING}", table, size))
    return [*items, *small_values(config, size), *rotary_tables(config)]


def plan_lora(config: ModelConfig, max_loras: int, max_rank: int, size: int) -> list[MemoryItem]:
    """Plan the matrices of LoRA adapters, all of the largest rank, in values of `size` bytes."""
    if not max_loras:
        return []
    matrices = [matrix for layer in config.layers for matrix in layer.adaptable]
    rows = sum(matrix.in_features + out for matrix in matrices for _, out in matrix.parts)
    formula = f"{max_loras} adapters x rank {max_rank} x {rows:,}"
    return [value_item("LoRA adapters", formula, max_loras * max_rank * rows, size)]


def _matrix_item(name: str, shapes: Counter[tuple[int, int]], size: int) -> MemoryItem:
    count = sum(number * out * inputs for (out, inputs), number in shapes.items())
    terms = (
        f"{out:,} x {inputs:,}" if number == 1 else f"{number} x {out:,} x {inputs:,}"
        for (out, inputs), number in shapes.items()
    )
    return value_item(name, join_terms(terms), count, size)


def small_values(config: ModelConfig, size: int) -> list[MemoryItem]:
    """All parameters that are not matrices, in values of `size` bytes, without rotary tables."""
    layers = Counter(layer.num_values_beside_matrices for layer in config.layers)
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
    return items


def rotary_tables(config: ModelConfig) -> list[MemoryItem]:
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


def join_terms(terms: Iterable[str]) -> str:
    """The sum of the terms as text, in parentheses if there are several."""
    text = " + ".join(found := list(terms))
    return text if len(found) == 1 else f"({text})"


def value_item(name: str, formula: str, count: int, size: int) -> MemoryItem:
    """An item of `count` values of `size` bytes."""
    return MemoryItem(name, f"{formula} values x {size} bytes", count * size)


# -- activations -----------------------------------------------------------------------------------------------------


def plan_activations(
    config: ModelConfig,
    limits: SchedulerConfig,
    block_size: int,
    dtype: str,
    device: str,
    layout: KVLayout | None = None,
) -> list[MemoryItem]:
    """Plan an upper bound of the memory of the largest step on the torch kernels, without weights, K and V.

    With T tokens, N sampled rows, L = max_model_len, hidden size H, inner size I, and b bytes for each value:

        residual stream   4 T H b; 6 T H b if a layer has an operation between a product and the residual sum
        widest layer      max(attention T d (7 heads + 3 KV heads) b + rotation in float32, MLP 3 T I b (ungated 2));
                          with E experts, of which each token has k, MLP T (5 H b + 32 E + 12 k) more
        per-layer inputs  T (4 L + 1) P b with P inputs for each of L layers
        gathered K, V     one tile or the longest sequence of one layer, twice, because it may grow within a step
        masks             for every chunk and decode over all L keys, one set for each window, backend and group
        scores            with a soft cap only: T heads L (4 twice, and b)
        logits            N V (48 + b), or the prompt logprobs if they need more
        request rows      token ids, block tables of each group of layers, and penalties of every seat

    The sum is an upper bound, because these are never all in memory at the same time. Attention without a soft cap is
    assumed to be fused, so its scores are not stored. The memory of the process (interpreter, libraries, a CUDA
    context) is not included.
    """
    size = DTYPE_BYTES[dtype]
    layout = layout or KVLayout.one_group(config.num_layers)
    branches = [_attention(layer.attention, limits, size) for layer in config.layers]
    branches += [_mlp(mlp, limits, config.hidden_size, size) for layer in config.layers for mlp in layer.feed_forwards]
    return [
        _residual(config, limits, size),
        max(branches, key=lambda item: item.num_bytes),
        *per_layer_rows(config, limits.max_num_batched_tokens, size),
        _gathered(config, limits, block_size, size, device),
        _masks(config, limits, block_size, size, layout),
        *_scores(config, limits, block_size, size),
        plan_logits(config, limits, LOGIT_BYTES + size, PROMPT_LOGIT_BYTES + size),
        plan_request_rows(limits, block_size, len(layout.windows)),
    ]


def _residual(config: ModelConfig, limits: SchedulerConfig, size: int) -> MemoryItem:
    tokens, hidden = limits.max_num_batched_tokens, config.hidden_size
    copies = 4 if all(layer.is_fused for layer in config.layers) else 6
    formula = f"{copies} x {tokens:,} x {hidden:,} x {size} bytes"
    return MemoryItem("residual stream", formula, copies * tokens * hidden * size)


def per_layer_rows(config: ModelConfig, tokens: int, size: int) -> list[MemoryItem]:
    """The inputs of all layers, with one unused input, and while they are computed their projection, its norm and the
    rows of the table."""
    if (inputs := config.per_layer_inputs) is None:
        return []
    layers = config.num_layers
    formula = f"{tokens:,} x (4 x {layers} + 1) x {inputs.size}"
    return [value_item("per-layer inputs", formula, tokens * (4 * layers + 1) * inputs.size, size)]


def _attention(spec: AttentionSpec, limits: SchedulerConfig, size: int) -> MemoryItem:
    tokens, heads, kv_heads, dim = limits.max_num_batched_tokens, spec.num_heads, spec.num_kv_heads, spec.head_dim
    values = dim * (7 * heads + 3 * kv_heads)
    rotation = 4 * dim * (4 * heads + 4) if spec.rope is not None else 0
    ids = 32 * kv_heads
    formula = (
        f"{tokens:,} x ({dim} x (7 x {heads} + 3 x {kv_heads}) x {size} + {rotation:,} rotation + {ids} slots) bytes"
    )
    return MemoryItem("widest layer: attention", formula, tokens * (values * size + rotation + ids))


def _mlp(spec: FeedForwardSpec, limits: SchedulerConfig, hidden: int, size: int) -> MemoryItem:
    """The inner rows; with experts also the rows that one expert may have, which are all, the logits and the choice."""
    tokens, inner = limits.max_num_batched_tokens, spec.inner_size
    factor = 3 if spec.gated else 2
    if spec.router is None:
        formula = f"{tokens:,} x {factor} x {inner:,} x {size} bytes"
        return MemoryItem("widest layer: MLP", formula, tokens * factor * inner * size)
    num_experts, chosen = spec.router.num_experts, spec.router.routing.experts_per_token
    formula = (
        f"{tokens:,} x (({factor} x {inner:,} + 5 x {hidden:,}) x {size} + 32 x {num_experts} + 12 x {chosen}) bytes"
    )
    row = (factor * inner + 5 * hidden) * size + 32 * num_experts + 12 * chosen
    return MemoryItem("widest layer: experts", formula, tokens * row)


def _gathered(config: ModelConfig, limits: SchedulerConfig, block_size: int, size: int, device: str) -> MemoryItem:
    """The gathered K and V of all attention backends, each of which has its own tile."""
    tile, length = TILE_BYTES[device], -(-limits.max_model_len // block_size) * block_size
    specs = (layer.attention for layer in config.layers)
    backends = dict.fromkeys((spec.scale, spec.query_size, spec.head_dim, spec.key_size) for spec in specs)
    formulas, count = [], 0
    for *_, key_size in backends:
        sequence = length * 2 * key_size * size
        batch = limits.max_num_seqs * sequence
        formulas.append(f"min(max({tile:,} tile, {sequence:,} sequence), {batch:,} batch)")
        count += min(max(tile, sequence), batch)
    return MemoryItem("gathered K and V of a layer", f"2 x {join_terms(formulas)} bytes", 2 * count)


def _masks(config: ModelConfig, limits: SchedulerConfig, block_size: int, size: int, layout: KVLayout) -> MemoryItem:
    tokens, seqs = limits.max_num_batched_tokens, min(limits.max_num_seqs, limits.max_num_batched_tokens)
    length = -(-limits.max_model_len // block_size) * block_size
    specs = [layer.attention for layer in config.layers]
    grouped = [(group, specs[index]) for group, indices in enumerate(layout.layers) for index in indices]
    sets = len({(g, s.scale, s.query_size, s.head_dim, s.key_size, s.sliding_window) for g, s in grouped})
    ids = (8 * max(spec.num_kv_heads for spec in specs) + 32) * (length // block_size)
    row = length * (size + 9) + ids
    formula = f"{sets} x ({tokens:,} x {length:,} x {size + 1} + {seqs:,} x {row:,}) bytes"
    return MemoryItem("masks and block ids", formula, sets * (tokens * length * (size + 1) + seqs * row))


def _scores(config: ModelConfig, limits: SchedulerConfig, block_size: int, size: int) -> list[MemoryItem]:
    """The scores of attention with a soft cap or sinks, for which torch has no fused kernel."""
    specs = [layer.attention for layer in config.layers]
    heads = [spec.num_heads for spec in specs if spec.logits_soft_cap is not None or spec.sinks is not None]
    if not heads:
        return []
    tokens, length = limits.max_num_batched_tokens, -(-limits.max_model_len // block_size) * block_size
    formula = f"{tokens:,} x {max(heads)} x {length:,} x {8 + size} bytes"
    return [MemoryItem("scores of attention", formula, tokens * max(heads) * length * (8 + size))]


def plan_logits(config: ModelConfig, limits: SchedulerConfig, logit_bytes: int, prompt_logit_bytes: int) -> MemoryItem:
    """Plan the logits and their copies: those of sampled rows, or those of prompt logprobs if they need more."""
    vocab, rows = config.vocab_size, limits.max_logit_rows
    prompt_rows = min(PROMPT_LOGPROB_ROWS, limits.max_num_batched_tokens)
    sampled, prompt = rows * vocab * logit_bytes, prompt_rows * vocab * prompt_logit_bytes
    if prompt > sampled:
        return MemoryItem("logits: prompt logprobs", f"{prompt_rows} x {vocab:,} x {prompt_logit_bytes} bytes", prompt)
    return MemoryItem("logits and sampling", f"{rows} x {vocab:,} x {logit_bytes} bytes", sampled)


def plan_request_rows(limits: SchedulerConfig, block_size: int, num_groups: int = 1) -> MemoryItem:
    """Plan the request rows: int32 token ids and block tables, and index arrays of penalties (48 bytes a token)."""
    seqs, length = limits.max_num_seqs, limits.max_model_len
    blocks = -(-length // block_size)
    tables = f"{blocks:,} x 4" if num_groups == 1 else f"{num_groups} x {blocks:,} x 4"
    formula = f"{seqs:,} x ({length:,} x (4 + 48) + {tables}) bytes"
    return MemoryItem("request rows and penalties", formula, seqs * (length * 52 + num_groups * blocks * 4))
