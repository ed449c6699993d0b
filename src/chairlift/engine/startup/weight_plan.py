"""The planned memory of the weights of a model, from its declaration and the formats in its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from chairlift.config import EngineConfig
from chairlift.kernels.kernel_memory import (
    DTYPE_BYTES,
    KernelMemory,
    MemoryItem,
    StoredMatrix,
    join_terms,
    value_item,
)
from chairlift.models.declaration import EMBEDDING, LM_HEAD, MatrixSpec, ModelConfig

MatrixFormats = Callable[[str], str]
"""Maps the name of a parameter to its format in the file, as in `PackedRows.format`."""


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
    name = "rotary table, float32" if len(sizes) == 1 else "rotary tables, float32"
    return [value_item(name, formula, positions * sum(sizes), 4)]


def plan_lora(model_config: ModelConfig, config: EngineConfig, dtype: str) -> list[MemoryItem]:
    """Plan the matrices of LoRA adapters, all of the largest rank, in values of `dtype`."""
    if not config.num_loras:
        return []
    matrices = [matrix for layer in model_config.layers for matrix in layer.adaptable]
    rows = sum(matrix.in_features + out for matrix in matrices for _, out in matrix.parts)
    formula = f"{config.num_loras} adapters x rank {config.max_lora_rank} x {rows:,}"
    return [value_item("LoRA adapters", formula, config.num_loras * config.max_lora_rank * rows, DTYPE_BYTES[dtype])]
