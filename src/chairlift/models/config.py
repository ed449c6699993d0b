"""ModelConfig: the declaration of a whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chairlift.models.declaration import (
    LayerSpec,
    MatrixSpec,
    NormSpec,
    PositionTableSpec,
    ProductSpec,
    RopeConfig,
    norm_prologue,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The declaration of a decoder-only text model, and the special tokens of its checkpoint.

    Attributes:
        architecture: a key of `models.registry.ARCHITECTURES` ("llama", "opt").
        name: the model type in the file ("llama", "mistral", "qwen2", "qwen3", "opt").
        embedding: the embedding table [vocab_size, width of a word vector].
        head: the matrix that computes the logits; with tie_word_embeddings it is the embedding's.
        final_norm: the norm before the head, or before project_out if there is one.
        project_in, project_out: the projections from the width of a word vector to hidden_size and back, or None if the
            widths are equal.
        embedding_multiplier, logits_multiplier: the factors of the embedding's and of the head's output.
        logits_soft_cap: c in c * tanh(logits / c), which is applied after the multiplier, or None.
        eos_token_ids: all tokens that end a sequence, including those of generation_config.json.
        dtype: the type of the file's tensors ("float32", "float16", "bfloat16"); "float16" if they are quantized.
    """

    architecture: str
    name: str
    hidden_size: int
    max_position_embeddings: int
    embedding: MatrixSpec
    layers: tuple[LayerSpec, ...]
    head: MatrixSpec
    final_norm: NormSpec | None
    tie_word_embeddings: bool = False
    positions: PositionTableSpec | None = None
    project_in: MatrixSpec | None = None
    project_out: MatrixSpec | None = None
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    @property
    def vocab_size(self) -> int:
        return self.embedding.out_features

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_values_per_token(self) -> int:
        """The number of K and V values of one token in all layers."""
        return sum(2 * layer.attention.key_size for layer in self.layers)

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The distinct rotary embeddings, each with the head size that it rotates."""
        found = ((layer.attention.rope, layer.attention.head_dim) for layer in self.layers)
        return tuple(dict.fromkeys((rope, head_dim) for rope, head_dim in found if rope is not None))

    @property
    def matrices(self) -> Iterator[MatrixSpec]:
        """Every matrix in memory, each once. A tied head shares the embedding's matrix."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.matrices
        yield from self._projections
        if not self.tie_word_embeddings:
            yield self.head

    @property
    def read_matrices(self) -> Iterator[MatrixSpec]:
        """Every matrix that a step reads completely, including the head's. Of the embedding a step reads some rows."""
        for layer in self.layers:
            yield from layer.matrices
        yield from self._projections
        yield self.head_product.matrix

    @property
    def head_product(self) -> ProductSpec:
        """The product that computes the logits. It uses the embedding's matrix if the head is tied."""
        norm = None if self.project_out is not None else self.final_norm
        if not self.tie_word_embeddings:
            return ProductSpec(self.head, norm_prologue(norm))
        tied = MatrixSpec(self.head.group, self.head.kernel, self.embedding.parts, self.head.in_features)
        return ProductSpec(tied, norm_prologue(norm))

    @property
    def norm_names(self) -> Iterator[str]:
        """The names of all norms, including the norms of query and key heads."""
        for layer in self.layers:
            yield from (norm.name for norm in layer.norms)
            if layer.attention.head_norm is not None:
                yield from (layer.attention.head_norm.query, layer.attention.head_norm.key)
        if self.final_norm is not None:
            yield self.final_norm.name

    @property
    def _projections(self) -> tuple[MatrixSpec, ...]:
        return tuple(matrix for matrix in (self.project_in, self.project_out) if matrix is not None)
