"""What a model holds in memory: its weights exactly, the activations of a step as an upper bound.

Everything is a list of lines, each with its arithmetic in words, so that a plan can be checked by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.models.config import ModelConfig
from chairlift.models.declaration import EMBEDDING, LM_HEAD, AttentionSpec, FeedForwardSpec

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

KV_DTYPE_BYTES: Final = {**DTYPE_BYTES, "int8": 1}

INT8_SCALE_BYTES: Final = 8
"""A float32 for the key and one for the value of each token and KV head."""

PACKED_DTYPES: Final = ("float32", "bfloat16")
"""Types whose matrices the CPU kernels keep in an order of their own."""

TILE_BYTES: Final = {"cpu": 1 << 22, "cuda": 1 << 29}
"""Of K and V that one attention product of decodes gathers; those of `kernels.torch_plan`."""

LOGIT_BYTES: Final = 48
"""A sampled row and token of the vocabulary at worst, besides the logit in the model's type: float32 logits (4), a copy
for logprobs (4), of the rows that are drawn (4) and of those that are filtered (4), a full sort (values 4, ids 8), its
running sum and the sum before each (8 + 8), penalty counts (4)."""

PROMPT_LOGPROB_ROWS: Final = 256
"""Rows of prompt logprobs at a time, that of `worker.model_runner`."""

PROMPT_LOGIT_BYTES: Final = 12
"""Such a row and token, besides the logit in the model's type: float32 logits (4), and what log_softmax and ranks need
besides (8)."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of a memory plan: what takes the memory, how its size is computed, and the size in bytes."""

    name: str
    formula: str
    num_bytes: int


def total(items: Sequence[MemoryItem]) -> int:
    """The bytes of all of them."""
    return sum(item.num_bytes for item in items)


def kv_slot_bytes(config: ModelConfig, kv_cache_dtype: str) -> int:
    """K and V of one token in all layers, in bytes, scales included; the type is one of KV_DTYPE_BYTES."""
    num_heads = sum(layer.state.num_kv_heads for layer in config.layers)
    scales = INT8_SCALE_BYTES * num_heads if kv_cache_dtype == "int8" else 0
    return config.kv_values_per_token * KV_DTYPE_BYTES[kv_cache_dtype] + scales


# -- weights ---------------------------------------------------------------------------------------------------------


def plan_weights(config: ModelConfig, dtype: str, device: str, kernels: str = "torch") -> list[MemoryItem]:
    """What a loaded model holds, in bytes: every parameter in the compute type, whatever type its file has.

    On the CPU the kernels keep matrices packed, and the plain ones are dropped; but a table that is tied to the LM head
    is needed as it is, too, and so it is there twice.

    Args:
        dtype: of DTYPE_BYTES; device: "cpu" or "cuda".
    """
    size = DTYPE_BYTES[dtype]
    is_packed = device == "cpu" and kernels != "reference" and dtype in PACKED_DTYPES
    groups: dict[str, Counter[tuple[int, int]]] = {}
    for matrix in config.matrices:
        groups.setdefault(matrix.group, Counter())[matrix.out_features, matrix.in_features] += 1
    items = [_matrix_values(group, shapes, size) for group, shapes in groups.items()]
    if config.tie_word_embeddings and is_packed:
        table = Counter({(config.head.out_features, config.head.in_features): 1})
        items.append(_matrix_values(f"{LM_HEAD}, packed copy of the {EMBEDDING}", table, size))
    return [*items, *small_values(config, size), *rotary_tables(config)]


def _matrix_values(what: str, shapes: Counter[tuple[int, int]], size: int) -> MemoryItem:
    count = sum(number * out * inputs for (out, inputs), number in shapes.items())
    terms = (
        f"{out:,} x {inputs:,}" if number == 1 else f"{number} x {out:,} x {inputs:,}"
        for (out, inputs), number in shapes.items()
    )
    return values(what, joined(terms), count, size)


def small_values(config: ModelConfig, size: int) -> list[MemoryItem]:
    """Everything that is no matrix of a product, in values of `size` bytes; rotary tables are not among them."""
    layers = Counter(layer.num_values_beside_matrices for layer in config.layers)
    count = sum(number * small for small, number in layers.items())
    how = joined(f"{number} x {small:,}" for small, number in layers.items())
    items = [values("norms and biases", how, count, size)]
    table, norm = config.positions, config.final_norm
    if table is not None:
        items.append(values("positions", f"{table.rows:,} x {table.size:,}", table.num_values, size))
    if norm is not None:
        items.append(values("final norm", f"{norm.num_values:,}", norm.num_values, size))
    return items


def rotary_tables(config: ModelConfig) -> list[MemoryItem]:
    """Cosines and sines of all positions, a table for each rotary embedding."""
    positions, sizes = config.max_position_embeddings, [head_dim for _, head_dim in config.ropes]
    if not sizes:
        return []
    how = f"{positions:,} x {joined(str(size) for size in sizes)}"
    return [
        values("rotary table, float32" if len(sizes) == 1 else "rotary tables, float32", how, positions * sum(sizes), 4)
    ]


def joined(terms: Iterable[str]) -> str:
    """The terms as a sum, in parentheses if there are several."""
    text = " + ".join(found := list(terms))
    return text if len(found) == 1 else f"({text})"


def values(what: str, how: str, count: int, size: int) -> MemoryItem:
    """So many values of `size` bytes."""
    return MemoryItem(what, f"{how} values x {size} bytes", count * size)


# -- activations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step there can be.

    Attributes:
        num_tokens: the token budget; num_seqs: seats; max_model_len: tokens that a query can see.
    """

    num_tokens: int
    num_seqs: int
    max_model_len: int
    block_size: int


def plan_activations(config: ModelConfig, limits: StepLimits, dtype: str, device: str) -> list[MemoryItem]:
    """An upper bound of what the largest step needs besides weights, K and V, in bytes, for the torch kernels.

    With T tokens, N rows that sample, L = max_model_len, H hidden, I inner, b bytes a value:

        residual stream   4 T H b; 6 T H b where something comes between a product and the sum
        widest layer      max(attention T d (7 heads + 3 KV heads) b + rotation in float32, MLP 3 T I b (ungated 2))
        gathered K, V     twice (it may grow within a step) one tile or one longest sequence, of one layer
        masks             of every chunk and every decode, over all L keys, a set for each window and backend
        logits            N V (48 + b), or prompt logprobs where they are more
        request rows      token ids and block tables of every seat, penalties

    All of it at once, which never happens: the sum is what is set aside. Attention itself is taken to be fused, so no
    scores are kept. The process (interpreter, libraries, a CUDA context) is not in it.
    """
    size = DTYPE_BYTES[dtype]
    return [
        _residual(config, limits, size),
        _widest(config, limits, size),
        _gathered(config, limits, size, device),
        _masks(config, limits, size),
        plan_logits(config, limits, LOGIT_BYTES + size, PROMPT_LOGIT_BYTES + size),
        plan_request_rows(limits),
    ]


def _residual(config: ModelConfig, limits: StepLimits, size: int) -> MemoryItem:
    tokens, hidden = limits.num_tokens, config.hidden_size
    copies = 4 if all(layer.is_fused for layer in config.layers) else 6
    how = f"{copies} x {tokens:,} x {hidden:,} x {size} bytes"
    return MemoryItem("residual stream", how, copies * tokens * hidden * size)


def _widest(config: ModelConfig, limits: StepLimits, size: int) -> MemoryItem:
    """The branch with the largest activations."""
    found = [_attention(layer.attention, limits, size) for layer in config.layers]
    found += [_mlp(layer.feed_forward, limits, size) for layer in config.layers]
    return max(found, key=lambda item: item.num_bytes)


def _attention(spec: AttentionSpec, limits: StepLimits, size: int) -> MemoryItem:
    tokens, heads, kv_heads, dim = limits.num_tokens, spec.num_heads, spec.num_kv_heads, spec.head_dim
    values = dim * (7 * heads + 3 * kv_heads)
    rotation = 4 * dim * (4 * heads + 4) if spec.rope is not None else 0
    ids = 32 * kv_heads
    how = f"{tokens:,} x ({dim} x (7 x {heads} + 3 x {kv_heads}) x {size} + {rotation:,} rotation + {ids} slots) bytes"
    return MemoryItem("widest layer: attention", how, tokens * (values * size + rotation + ids))


def _mlp(spec: FeedForwardSpec, limits: StepLimits, size: int) -> MemoryItem:
    tokens, inner = limits.num_tokens, spec.inner_size
    factor = 3 if spec.gated else 2
    how = f"{tokens:,} x {factor} x {inner:,} x {size} bytes"
    return MemoryItem("widest layer: MLP", how, tokens * factor * inner * size)


def _gathered(config: ModelConfig, limits: StepLimits, size: int, device: str) -> MemoryItem:
    """Every attention backend has a tile of its own."""
    found = [_gathered_by(key_size, limits, size, device) for key_size in _backend_key_sizes(config)]
    how, count = joined(how for how, _ in found), sum(count for _, count in found)
    return MemoryItem("gathered K and V of a layer", f"2 x {how} bytes", 2 * count)


def _backend_key_sizes(config: ModelConfig) -> list[int]:
    specs = [layer.attention for layer in config.layers]
    return [
        keys
        for *_, keys in dict.fromkeys((spec.scale, spec.query_size, spec.head_dim, spec.key_size) for spec in specs)
    ]


def _gathered_by(key_size: int, limits: StepLimits, size: int, device: str) -> tuple[str, int]:
    blocks = -(-limits.max_model_len // limits.block_size)
    sequence = blocks * limits.block_size * 2 * key_size * size
    batch = limits.num_seqs * sequence
    how = f"min(max({TILE_BYTES[device]:,} tile, {sequence:,} sequence), {batch:,} batch)"
    return how, min(max(TILE_BYTES[device], sequence), batch)


def _masks(config: ModelConfig, limits: StepLimits, size: int) -> MemoryItem:
    tokens, seqs = limits.num_tokens, min(limits.num_seqs, limits.num_tokens)
    length = -(-limits.max_model_len // limits.block_size) * limits.block_size
    specs = [layer.attention for layer in config.layers]
    sets = len({(spec.scale, spec.query_size, spec.head_dim, spec.key_size, spec.sliding_window) for spec in specs})
    ids = (8 * max(spec.num_kv_heads for spec in specs) + 32) * (length // limits.block_size)
    row = length * (size + 9) + ids
    how = f"{sets} x ({tokens:,} x {length:,} x {size + 1} + {seqs:,} x {row:,}) bytes"
    return MemoryItem("masks and block ids", how, sets * (tokens * length * (size + 1) + seqs * row))


def plan_logits(config: ModelConfig, limits: StepLimits, logit_bytes: int, prompt_logit_bytes: int) -> MemoryItem:
    """Logits of sampled rows, or of prompt tokens if those are more, and all that is made of them."""
    vocab, rows = config.vocab_size, min(limits.num_seqs, limits.num_tokens)
    prompt_rows = min(PROMPT_LOGPROB_ROWS, limits.num_tokens)
    sampled, prompt = rows * vocab * logit_bytes, prompt_rows * vocab * prompt_logit_bytes
    if prompt > sampled:
        return MemoryItem("logits: prompt logprobs", f"{prompt_rows} x {vocab:,} x {prompt_logit_bytes} bytes", prompt)
    return MemoryItem("logits and sampling", f"{rows} x {vocab:,} x {logit_bytes} bytes", sampled)


def plan_request_rows(limits: StepLimits) -> MemoryItem:
    """Token ids int32, a block table int32, and the index arrays of penalties (token ids, counts, values: 48 bytes)."""
    seqs, length = limits.num_seqs, limits.max_model_len
    blocks = -(-length // limits.block_size)
    how = f"{seqs:,} x ({length:,} x (4 + 48) + {blocks:,} x 4) bytes"
    return MemoryItem("request rows and penalties", how, seqs * (length * 52 + blocks * 4))
