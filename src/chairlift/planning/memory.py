"""What a model holds in memory: its weights exactly, the activations of a step as an upper bound.

Everything is a list of lines, each with its arithmetic in words, so that a plan can be checked by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.models.config import ModelConfig
from chairlift.sim.model_shape import ModelShape

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

KV_DTYPE_BYTES: Final = {**DTYPE_BYTES, "int8": 1}

INT8_SCALE_BYTES: Final = 8
"""A float32 for the key and one for the value of each token and KV head."""

PACKED_DTYPES: Final = ("float32", "bfloat16")
"""Types whose matrices the CPU kernels keep in an order of their own."""

OPT_POSITION_OFFSET: Final = 2

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
class Amount:
    """A number of bytes, what for, and how it comes about."""

    what: str
    how: str
    num_bytes: int


def total(amounts: Sequence[Amount]) -> int:
    """The bytes of all of them."""
    return sum(amount.num_bytes for amount in amounts)


def kv_slot_bytes(config: ModelConfig, kv_cache_dtype: str) -> int:
    """K and V of one token in all layers, in bytes, scales included; the type is one of KV_DTYPE_BYTES."""
    scales = INT8_SCALE_BYTES * config.num_layers * config.num_kv_heads if kv_cache_dtype == "int8" else 0
    return config.kv_values_per_token * KV_DTYPE_BYTES[kv_cache_dtype] + scales


def config_of(shape: ModelShape) -> ModelConfig:
    """A shape as a model of ours: a Llama if it is gated, else an OPT, whose embeddings are tied."""
    is_llama = shape.gated
    return ModelConfig(
        architecture="llama" if is_llama else "opt",
        name=shape.name,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        norm_eps=1e-5,
        sliding_windows=(None,) * shape.num_layers,
        activation="silu" if is_llama else "relu",
        tie_word_embeddings=not is_llama,
        attention_bias=not is_llama,
        attention_output_bias=not is_llama,
        mlp_bias=not is_llama,
        dtype="float16",
    )


# -- weights ---------------------------------------------------------------------------------------------------------


def plan_weights(config: ModelConfig, dtype: str, device: str, kernels: str = "torch") -> list[Amount]:
    """What a loaded model holds, in bytes: every parameter in the compute type, whatever type its file has.

    On the CPU the kernels keep matrices packed, and the plain ones are dropped; but a table that is tied to the LM head
    is needed as it is, too, and so it is there twice.

    Args:
        dtype: of DTYPE_BYTES; device: "cpu" or "cuda".
    """
    size = DTYPE_BYTES[dtype]
    is_packed = device == "cpu" and kernels != "reference" and dtype in PACKED_DTYPES
    word = config.word_embed_proj_dim or config.hidden_size
    table = config.vocab_size * word
    rows = f"{config.vocab_size:,} x {word:,}"
    amounts = [values("embedding", rows, table, size), *_layers(config, size), *_around_layers(config, word, size)]
    if not config.tie_word_embeddings:
        amounts.append(values("LM head", rows, table, size))
    elif is_packed:
        amounts.append(values("LM head, packed copy of the embedding", rows, table, size))
    return [*amounts, *rotary_table(config)]


def rotary_table(config: ModelConfig) -> list[Amount]:
    """Cosines and sines of all positions, where a model rotates."""
    if config.architecture != "llama":
        return []
    positions, dim = config.max_position_embeddings, config.head_dim
    return [values("rotary table, float32", f"{positions:,} x {dim}", positions * dim, 4)]


def _layers(config: ModelConfig, size: int) -> list[Amount]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys, layers = config.num_heads * dim, config.num_kv_heads * dim, config.num_layers
    gated = config.architecture == "llama"
    attention = hidden * 2 * (queries + keys)
    mlp = (3 if gated else 2) * hidden * inner
    amounts = [
        values("attention", f"{layers} x {hidden:,} x 2 x ({queries:,} + {keys:,})", layers * attention, size),
        values("MLP", f"{layers} x {3 if gated else 2} x {hidden:,} x {inner:,}", layers * mlp, size),
    ]
    small = values_beside_matrices(config)
    amounts.append(values("norms and biases", f"{layers} x {small:,}", layers * small, size))
    return amounts


def values_beside_matrices(config: ModelConfig) -> int:
    """Norms and biases of a layer. RMSNorm has a weight, LayerNorm a bias too."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    gated = config.architecture == "llama"
    small = (2 if gated else 4) * hidden
    small += queries + 2 * keys if config.attention_bias else 0
    small += hidden if config.attention_output_bias else 0
    small += (2 if gated else 1) * inner + hidden if config.mlp_bias else 0
    return small + (2 * dim if config.qk_norm else 0)


def _around_layers(config: ModelConfig, word: int, size: int) -> list[Amount]:
    """What stands before and behind the layers, besides embedding and LM head."""
    hidden = config.hidden_size
    if config.architecture == "llama":
        return [values("final norm", f"{hidden:,}", hidden, size)]
    rows = config.max_position_embeddings + OPT_POSITION_OFFSET
    amounts = [values("positions", f"{rows:,} x {hidden:,}", rows * hidden, size)]
    if word != hidden:
        amounts.append(values("projections", f"2 x {word:,} x {hidden:,}", 2 * word * hidden, size))
    if config.norm_before and config.final_norm:
        amounts.append(values("final norm", f"2 x {hidden:,}", 2 * hidden, size))
    return amounts


def values(what: str, how: str, count: int, size: int) -> Amount:
    """So many values of `size` bytes."""
    return Amount(what, f"{how} values x {size} bytes", count * size)


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


def plan_activations(config: ModelConfig, limits: StepLimits, dtype: str, device: str) -> list[Amount]:
    """An upper bound of what the largest step needs besides weights, K and V, in bytes, for the torch kernels.

    With T tokens, N rows that sample, L = max_model_len, H hidden, I inner, b bytes a value:

        residual stream   4 T H b
        widest layer      max(attention T d (7 heads + 3 KV heads) b + rotation in float32, MLP 3 T I b (ungated 2))
        gathered K, V     twice (it may grow within a step) one tile or one longest sequence, of one layer
        masks             of every chunk and every decode, over all L keys, one set a sliding window
        logits            N V (48 + b), or prompt logprobs where they are more
        request rows      token ids and block tables of every seat, penalties

    All of it at once, which never happens: the sum is what is set aside. Attention itself is taken to be fused, so no
    scores are kept. The process (interpreter, libraries, a CUDA context) is not in it.
    """
    size = DTYPE_BYTES[dtype]
    return [
        _residual(config, limits, size),
        max(_attention(config, limits, size), _mlp(config, limits, size), key=lambda amount: amount.num_bytes),
        _gathered(config, limits, size, device),
        _masks(config, limits, size),
        plan_logits(config, limits, LOGIT_BYTES + size, PROMPT_LOGIT_BYTES + size),
        plan_request_rows(limits),
    ]


def _residual(config: ModelConfig, limits: StepLimits, size: int) -> Amount:
    tokens, hidden = limits.num_tokens, config.hidden_size
    return Amount("residual stream", f"4 x {tokens:,} x {hidden:,} x {size} bytes", 4 * tokens * hidden * size)


def _attention(config: ModelConfig, limits: StepLimits, size: int) -> Amount:
    tokens, heads, kv_heads, dim = limits.num_tokens, config.num_heads, config.num_kv_heads, config.head_dim
    values = dim * (7 * heads + 3 * kv_heads)
    rotation = 4 * dim * (4 * heads + 4) if config.rope is not None or config.architecture == "llama" else 0
    ids = 32 * kv_heads
    how = f"{tokens:,} x ({dim} x (7 x {heads} + 3 x {kv_heads}) x {size} + {rotation:,} rotation + {ids} slots) bytes"
    return Amount("widest layer: attention", how, tokens * (values * size + rotation + ids))


def _mlp(config: ModelConfig, limits: StepLimits, size: int) -> Amount:
    tokens, inner = limits.num_tokens, config.intermediate_size
    factor = 3 if config.architecture == "llama" else 2
    how = f"{tokens:,} x {factor} x {inner:,} x {size} bytes"
    return Amount("widest layer: MLP", how, tokens * factor * inner * size)


def _gathered(config: ModelConfig, limits: StepLimits, size: int, device: str) -> Amount:
    blocks = -(-limits.max_model_len // limits.block_size)
    sequence = blocks * limits.block_size * 2 * config.num_kv_heads * config.head_dim * size
    batch = limits.num_seqs * sequence
    tile = min(max(TILE_BYTES[device], sequence), batch)
    how = f"2 x min(max({TILE_BYTES[device]:,} tile, {sequence:,} sequence), {batch:,} batch) bytes"
    return Amount("gathered K and V of a layer", how, 2 * tile)


def _masks(config: ModelConfig, limits: StepLimits, size: int) -> Amount:
    tokens, seqs = limits.num_tokens, min(limits.num_seqs, limits.num_tokens)
    length = -(-limits.max_model_len // limits.block_size) * limits.block_size
    windows = max(1, len(set(config.sliding_windows)))
    ids = (8 * config.num_kv_heads + 32) * (length // limits.block_size)
    row = length * (size + 9) + ids
    how = f"{windows} x ({tokens:,} x {length:,} x {size + 1} + {seqs:,} x {row:,}) bytes"
    return Amount("masks and block ids", how, windows * (tokens * length * (size + 1) + seqs * row))


def plan_logits(config: ModelConfig, limits: StepLimits, logit_bytes: int, prompt_logit_bytes: int) -> Amount:
    """Logits of sampled rows, or of prompt tokens if those are more, and all that is made of them."""
    vocab, rows = config.vocab_size, min(limits.num_seqs, limits.num_tokens)
    prompt_rows = min(PROMPT_LOGPROB_ROWS, limits.num_tokens)
    sampled, prompt = rows * vocab * logit_bytes, prompt_rows * vocab * prompt_logit_bytes
    if prompt > sampled:
        return Amount("logits: prompt logprobs", f"{prompt_rows} x {vocab:,} x {prompt_logit_bytes} bytes", prompt)
    return Amount("logits and sampling", f"{rows} x {vocab:,} x {logit_bytes} bytes", sampled)


def plan_request_rows(limits: StepLimits) -> Amount:
    """Token ids int32, a block table int32, and the index arrays of penalties (token ids, counts, values: 48 bytes)."""
    seqs, length = limits.num_seqs, limits.max_model_len
    blocks = -(-length // limits.block_size)
    how = f"{seqs:,} x ({length:,} x (4 + 48) + {blocks:,} x 4) bytes"
    return Amount("request rows and penalties", how, seqs * (length * 52 + blocks * 4))
