"""Memory plan of the native kernels: matrices in the file's formats or the configured one, and all else in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from chairlift.config import SchedulerConfig
from chairlift.engine.startup.memory_plan import (
    MemoryItem,
    per_layer_rows,
    plan_logits,
    plan_request_rows,
    rotary_tables,
    small_values,
    value_item,
)
from chairlift.kernels.cpu.formats import matrix_bytes, packed_parts, stripes
from chairlift.models.declaration import EMBEDDING, LM_HEAD, MatrixSpec, ModelConfig
from chairlift.models.torch_operations import torch_operations

MatrixFormats = Callable[[str], str]
"""Maps the name of a parameter to its format in the file, as in `PackedRows.format`."""

FLOAT_BYTES: Final = 4

LOGIT_BYTES: Final = 12
"""Maximum bytes for each sampled row and token of the vocabulary: logit, copy for logprobs, penalty count (4 each)."""


def plan_native_weights(config: ModelConfig, formats: MatrixFormats, quantization: str | None) -> list[MemoryItem]:
    """Plan the weights as `plan_weights`. An embedding table that is tied to the LM head is stored once."""
    groups: dict[str, Counter[tuple[int, int, str]]] = {}
    for matrix in config.matrices:
        group = _table(config) if matrix.group == EMBEDDING else matrix.group
        for name, out in native_parts(matrix, formats, quantization):
            groups.setdefault(group, Counter())[out, matrix.in_features, name] += 1
    return [
        *(_item(group, shapes) for group, shapes in groups.items()),
        *small_values(config, FLOAT_BYTES),
        *rotary_tables(config),
    ]


def native_read_bytes(config: ModelConfig, formats: MatrixFormats, quantization: str | None) -> int:
    """Bytes of the matrices that a step reads, which are all except an untied embedding table.

    A step with few tokens reads a part of the experts.
    """
    return sum(
        matrix_bytes(name, out, matrix.in_features)
        for matrix in config.read_matrices
        for name, out in native_parts(matrix, formats, quantization)
    )


def _table(config: ModelConfig) -> str:
    return f"{EMBEDDING} and {LM_HEAD}" if config.tie_word_embeddings else EMBEDDING


def native_parts(matrix: MatrixSpec, formats: MatrixFormats, quantization: str | None) -> list[tuple[str, int]]:
    """The (format, out_features) of the native matrices for a product of the model."""
    found = [(formats(f"{name}.weight"), out) for name, out in matrix.parts]
    return packed_parts(found, None if matrix.keeps_format else quantization)


def _item(name: str, shapes: Counter[tuple[int, int, str]]) -> MemoryItem:
    num_bytes = sum(count * matrix_bytes(kind, out, size) for (out, size, kind), count in shapes.items())
    return MemoryItem(name, " + ".join(_term(*shape, count) for shape, count in sorted(shapes.items())), num_bytes)


def _term(out_features: int, in_features: int, name: str, count: int) -> str:
    num_stripes, stripe_bytes = stripes(name, out_features, in_features)
    return f"{count} x {num_stripes:,} stripes x {stripe_bytes:,} bytes ({out_features:,} x {in_features:,} in {name})"


def plan_native_activations(
    config: ModelConfig, limits: SchedulerConfig, block_size: int, num_groups: int = 1
) -> list[MemoryItem]:
    """Plan the activations as `plan_activations`. All layers write to the same float32 rows.

    With T tokens, hidden size H, and for the widest layer Q and K as the widths of queries and keys, I as the inner
    size and d as the head size, the numbers of values are:

        residual stream   3 T H (OPT adds positions); 5 T H if a norm or factor comes between a product and the sum
        attention         T (2 Q + 2 K), and T d for the rotation
        MLP               2 T I
        experts           T (H + E + 4 k) with E experts, of which each token has k
        per-layer inputs  T (4 L + 1) P with P inputs for each of L layers
        product inputs    T times the widest input, at most float32, with scales
    """
    tokens, hidden = limits.max_num_batched_tokens, config.hidden_size
    inner = max(mlp.inner_size for layer in config.layers for mlp in layer.feed_forwards)
    specs = [layer.attention for layer in config.layers]
    queries, keys = max(spec.query_size for spec in specs), max(spec.key_size for spec in specs)
    head_dim = max(spec.head_dim for spec in specs)
    widest = max(hidden, queries, inner)
    copies = 3 if all(layer.is_fused for layer in config.layers) else 5
    return [
        value_item("residual stream", f"{copies} x {tokens:,} x {hidden:,}", copies * tokens * hidden, FLOAT_BYTES),
        value_item(
            "attention",
            f"{tokens:,} x (2 x {queries:,} + 2 x {keys:,} + {head_dim})",
            tokens * (2 * queries + 2 * keys + head_dim),
            FLOAT_BYTES,
        ),
        value_item("MLP", f"{tokens:,} x 2 x {inner:,}", tokens * 2 * inner, FLOAT_BYTES),
        value_item("inputs of the products", f"{tokens:,} x 2 x {widest:,}", tokens * 2 * widest, FLOAT_BYTES),
        *_expert_rows(config, tokens),
        *per_layer_rows(config, tokens, FLOAT_BYTES),
        *_torch_rows(config, tokens, inner),
        plan_logits(config, limits, LOGIT_BYTES, FLOAT_BYTES),
        plan_request_rows(limits, block_size, num_groups),
    ]


def _expert_rows(config: ModelConfig, tokens: int) -> list[MemoryItem]:
    """The rows of one expert, which may have all tokens; the logits of the router and the choice of experts."""
    mixtures = [layer.mixture.router for layer in config.layers if layer.mixture is not None]
    routers = [router for router in mixtures if router is not None]
    if not routers:
        return []
    num_experts = max(router.num_experts for router in routers)
    chosen = max(router.routing.experts_per_token for router in routers)
    formula = f"{tokens:,} x ({config.hidden_size:,} + {num_experts} + 4 x {chosen})"
    return [value_item("experts", formula, tokens * (config.hidden_size + num_experts + 4 * chosen), FLOAT_BYTES)]


def _torch_rows(config: ModelConfig, tokens: int, inner: int) -> list[MemoryItem]:
    """Rows of the activations that torch computes because native kernels lack them: an activation and a part of it."""
    if not torch_operations(config):
        return []
    return [value_item("rows that torch computes", f"{tokens:,} x 2 x {inner:,}", tokens * 2 * inner, FLOAT_BYTES)]
