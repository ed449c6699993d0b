"""The planned memory of the weights of a model, from its declaration and the formats in its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from chairlift.config import EngineConfig
from chairlift.kernels.kernel_memory import DTYPE_BYTES, KernelMemory, MemoryItem
from chairlift.models.declaration.matrix_spec import EMBEDDING, LM_HEAD, MatrixSpec
from chairlift.models.declaration.model_config import ModelConfig

MatrixFormats = Callable[[str], str]
"""Maps the name of a parameter to its format in the file, as in `PackedRows.format`."""


def plan_weights(config: ModelConfig, memory: KernelMemory, formats: MatrixFormats) -> list[MemoryItem]:
    """Plan the weights of a loaded model to the byte."""
    groups: Counter[str] = Counter()
    for matrix in config.matrices:
        groups[matrix.group] += _matrix_bytes(matrix, memory, formats)
    if config.tie_word_embeddings:
        table = groups.pop(EMBEDDING)
        groups[EMBEDDING if memory.copies_tied_table else f"{EMBEDDING} and {LM_HEAD}"] = table
        if memory.copies_tied_table:
            groups[f"{LM_HEAD}, packed copy of the {EMBEDDING}"] = table
    if config.predictor is not None and memory.copies_tied_table:
        head = _matrix_bytes(config.head_matrix, memory, formats)
        groups[f"{LM_HEAD}, packed copy for the predictor"] = head
    return [
        *(MemoryItem(group, num_bytes) for group, num_bytes in groups.items()),
        *_small_values(config, memory.value_bytes),
        *_rotary_tables(config),
    ]


def step_weight_bytes(config: ModelConfig, memory: KernelMemory, formats: MatrixFormats) -> int:
    """Bytes of the matrices that a step reads, which are all except an untied embedding table.

    A step with few tokens reads a part of the experts.
    """
    return sum(_matrix_bytes(matrix, memory, formats) for matrix in config.read_matrices)


def file_parts(matrix: MatrixSpec, formats: MatrixFormats) -> list[tuple[str, int]]:
    """The (format in the file, out_features) of the matrices of a product."""
    return [(formats(f"{name}.weight"), out) for name, out in matrix.parts]


def _matrix_bytes(matrix: MatrixSpec, memory: KernelMemory, formats: MatrixFormats) -> int:
    return memory.weight_bytes(file_parts(matrix, formats), matrix.in_features, matrix.keeps_format)


def _small_values(config: ModelConfig, size: int) -> list[MemoryItem]:
    """All parameters that are not matrices, in values of `size` bytes, without rotary tables."""
    counts = {"norms and biases": sum(layer.num_values_beside_matrices for layer in config.all_layers)}
    table, norm, inputs = config.positions, config.final_norm, config.per_layer_inputs
    if inputs is not None:
        counts["norm of per-layer inputs"] = inputs.norm.num_values
    if table is not None:
        counts["positions"] = table.num_values
    if config.encoder is not None and config.encoder.token_types is not None:
        counts["token types"] = config.encoder.token_types.num_values
    if config.embedding_norm is not None:
        counts["norm of embeddings"] = config.embedding_norm.num_values
    if norm is not None:
        counts["final norm"] = norm.num_values
    if config.predictor is not None:
        # The predictor reads hidden states after the final norm, which the head applies by itself.
        norms = (*config.predictor.norms, norm)
        counts["norms of the predictor"] = sum(each.num_values for each in norms if each is not None)
    return [MemoryItem(name, count * size) for name, count in counts.items()]


def _rotary_tables(config: ModelConfig) -> list[MemoryItem]:
    """Cosines, sines and query scales of all positions, in one table for each rotary embedding."""
    positions = config.max_position_embeddings
    sizes = [rope.num_dims(head_dim) + rope.scales_queries for rope, head_dim in config.ropes]
    if not sizes:
        return []
    name = "rotary table, float32" if len(sizes) == 1 else "rotary tables, float32"
    return [MemoryItem(name, positions * sum(sizes) * DTYPE_BYTES["float32"])]


def plan_lora(model_config: ModelConfig, config: EngineConfig, dtype: str) -> list[MemoryItem]:
    """Plan the matrices of LoRA adapters, all of the largest rank, in values of `dtype`."""
    if not config.num_loras:
        return []
    matrices = [matrix for layer in model_config.layers for matrix in layer.adaptable]
    rows = sum(matrix.in_features + out for matrix in matrices for _, out in matrix.parts)
    return [MemoryItem("LoRA adapters", config.num_loras * config.max_lora_rank * rows * DTYPE_BYTES[dtype])]
