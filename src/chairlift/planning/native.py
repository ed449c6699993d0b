"""What a model holds in memory on native kernels: matrices in the formats of the file or in the one asked for,
everything else in float32, and the memory that a step's rows are written to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from chairlift.kernels.cpu.formats import common_format, matrix_bytes, stripes
from chairlift.models.config import ModelConfig
from chairlift.planning.memory import (
    OPT_POSITION_OFFSET,
    Amount,
    StepLimits,
    plan_logits,
    plan_request_rows,
    rotary_table,
    values,
    values_beside_matrices,
)

MatrixFormats = Callable[[str], str]
"""Name of a parameter -> how the file holds it, as `PackedRows.format`."""

FLOAT_BYTES: Final = 4

LOGIT_BYTES: Final = 12
"""A sampled row and token of the vocabulary at worst: the logit, a copy for logprobs, penalty counts (4 each)."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Parts that are multiplied as one: their names, outputs of all of them, and inputs."""

    what: str
    names: tuple[str, ...]
    out_features: int
    in_features: int


def plan_native_weights(config: ModelConfig, formats: MatrixFormats, quantization: str | None) -> list[Amount]:
    """As `plan_weights`. A table that is tied to the LM head is there once, and serves both."""
    kinds: dict[str, Counter[tuple[int, int, str]]] = {}
    for matrix in _matrices(config):
        found = quantization or common_format([formats(f"{name}.weight") for name in matrix.names])
        kinds.setdefault(matrix.what, Counter())[matrix.out_features, matrix.in_features, found] += 1
    small = config.num_layers * values_beside_matrices(config)
    return [
        *(_amount(what, shapes) for what, shapes in kinds.items()),
        values("norms and biases", f"{small:,}", small, FLOAT_BYTES),
        *_around_layers(config),
        *rotary_table(config),
    ]


def native_read_bytes(config: ModelConfig, formats: MatrixFormats, quantization: str | None) -> int:
    """Of the matrices that every step reads: all but an embedding that is not tied."""
    read = ("attention", "MLP", "projections", _head(config))
    amounts = plan_native_weights(config, formats, quantization)
    return sum(amount.num_bytes for amount in amounts if amount.what in read)


def _head(config: ModelConfig) -> str:
    return "embedding and LM head" if config.tie_word_embeddings else "LM head"


def _amount(what: str, shapes: Counter[tuple[int, int, str]]) -> Amount:
    num_bytes = sum(count * matrix_bytes(name, out, size) for (out, size, name), count in shapes.items())
    return Amount(what, " + ".join(_term(*shape, count) for shape, count in sorted(shapes.items())), num_bytes)


def _term(out_features: int, in_features: int, name: str, count: int) -> str:
    num_stripes, stripe_bytes = stripes(name, out_features, in_features)
    return f"{count} x {num_stripes:,} stripes x {stripe_bytes:,} bytes ({out_features:,} x {in_features:,} in {name})"


def _matrices(config: ModelConfig) -> Iterator[Matrix]:
    is_llama = config.architecture == "llama"
    root = "model" if is_llama else "model.decoder"
    word = config.word_embed_proj_dim or config.hidden_size
    table = _head(config) if config.tie_word_embeddings else "embedding"
    yield Matrix(table, (f"{root}.embed_tokens",), config.vocab_size, word)
    for index in range(config.num_layers):
        layer = f"{root}.layers.{index}"
        yield from _llama_layer(config, layer) if is_llama else _opt_layer(config, layer)
    if word != config.hidden_size:
        yield Matrix("projections", (f"{root}.project_in",), config.hidden_size, word)
        yield Matrix("projections", (f"{root}.project_out",), word, config.hidden_size)
    if not config.tie_word_embeddings:
        yield Matrix("LM head", ("lm_head",), config.vocab_size, word)


def _llama_layer(config: ModelConfig, layer: str) -> Iterable[Matrix]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return (
        *_attention(config, f"{layer}.self_attn", "o_proj"),
        Matrix("MLP", (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"), 2 * inner, hidden),
        Matrix("MLP", (f"{layer}.mlp.down_proj",), hidden, inner),
    )


def _opt_layer(config: ModelConfig, layer: str) -> Iterable[Matrix]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return (
        *_attention(config, f"{layer}.self_attn", "out_proj"),
        Matrix("MLP", (f"{layer}.fc1",), inner, hidden),
        Matrix("MLP", (f"{layer}.fc2",), hidden, inner),
    )


def _attention(config: ModelConfig, prefix: str, output: str) -> Iterable[Matrix]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    names = tuple(f"{prefix}.{part}_proj" for part in "qkv")
    return (
        Matrix("attention", names, queries + 2 * keys, config.hidden_size),
        Matrix("attention", (f"{prefix}.{output}",), config.hidden_size, queries),
    )


def _around_layers(config: ModelConfig) -> list[Amount]:
    hidden = config.hidden_size
    if config.architecture == "llama":
        return [values("final norm", f"{hidden:,}", hidden, FLOAT_BYTES)]
    rows = config.max_position_embeddings + OPT_POSITION_OFFSET
    amounts = [values("positions", f"{rows:,} x {hidden:,}", rows * hidden, FLOAT_BYTES)]
    if config.norm_before and config.final_norm:
        amounts.append(values("final norm", f"2 x {hidden:,}", 2 * hidden, FLOAT_BYTES))
    return amounts


def plan_native_activations(config: ModelConfig, limits: StepLimits) -> list[Amount]:
    """As `plan_activations`. Every layer writes into the same rows, all float32: with T tokens, H hidden, Q and K the
    widths of queries and keys, I inner,

        residual stream   3 T H (an OPT adds positions)
        attention         T (2 Q + 2 K), and T d of rotation
        MLP               2 T I
        row formats       T of the widest input, in float32 at most, with its scales
    """
    tokens, hidden, inner = limits.num_tokens, config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widest = max(hidden, queries, inner)
    return [
        values("residual stream", f"3 x {tokens:,} x {hidden:,}", 3 * tokens * hidden, FLOAT_BYTES),
        values(
            "attention",
            f"{tokens:,} x (2 x {queries:,} + 2 x {keys:,} + {config.head_dim})",
            tokens * (2 * queries + 2 * keys + config.head_dim),
            FLOAT_BYTES,
        ),
        values("MLP", f"{tokens:,} x 2 x {inner:,}", tokens * 2 * inner, FLOAT_BYTES),
        values("rows as the products read them", f"{tokens:,} x 2 x {widest:,}", tokens * 2 * widest, FLOAT_BYTES),
        plan_logits(config, limits, LOGIT_BYTES, FLOAT_BYTES),
        plan_request_rows(limits),
    ]
