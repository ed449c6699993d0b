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
    """A decoder-only text model: its declaration, and what a checkpoint says of its tokens.

    Attributes:
        architecture: a key of `models.registry.ARCHITECTURES` ("llama", "opt").
        name: the model type as the file says it ("llama", "mistral", "qwen2", "qwen3", "opt").
        embedding: the table, vocabulary by width of a word vector.
        head: gives the logits; with tie_word_embeddings its matrix is the embedding's.
        final_norm: before the head, or before project_out where there is one.
        project_in, project_out: between the width of a word vector and hidden_size, where they differ.
        embedding_multiplier, logits_multiplier: factors of what the embedding and the head give.
        logits_soft_cap: c, for c * tanh(logits / c) after the multiplier; None: none.
        eos_token_ids: every token that ends a sequence, generation_config.json's included.
        dtype: of the file's tensors ("float32", "float16", "bfloat16"); "float16" if they are quantized.
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
        """K and V values that one token keeps, over all layers."""
        return sum(layer.state.values_per_token for layer in self.layers)

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The rotary embeddings, each once, with the head size that they rotate."""
        found = ((layer.attention.rope, layer.attention.head_dim) for layer in self.layers)
        return tuple(dict.fromkeys((rope, head_dim) for rope, head_dim in found if rope is not None))

    @property
    def matrices(self) -> Iterator[MatrixSpec]:
        """Every matrix that is kept, each once: a tied head has none of its own."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.matrices
        yield from self._projections
        if not self.tie_word_embeddings:
            yield self.head

    @property
    def read_matrices(self) -> Iterator[MatrixSpec]:
        """Every matrix that a step reads as a whole, that of the head included; of the embedding a step reads rows."""
        for layer in self.layers:
            yield from layer.matrices
        yield from self._projections
        yield self.head_product.matrix

    @property
    def head_product(self) -> ProductSpec:
        """The product that gives the logits, over the embedding's matrix if it is tied."""
        norm = None if self.project_out is not None else self.final_norm
        if not self.tie_word_embeddings:
            return ProductSpec(self.head, norm_prologue(norm))
        tied = MatrixSpec(self.head.group, self.head.kernel, self.embedding.parts, self.head.in_features)
        return ProductSpec(tied, norm_prologue(norm))

    @property
    def norm_names(self) -> Iterator[str]:
        """Of all norms, those of heads included."""
        for layer in self.layers:
            yield from (norm.name for norm in layer.norms)
            if layer.attention.head_norm is not None:
                yield from (layer.attention.head_norm.query, layer.attention.head_norm.key)
        if self.final_norm is not None:
            yield self.final_norm.name

    @property
    def _projections(self) -> tuple[MatrixSpec, ...]:
        return tuple(matrix for matrix in (self.project_in, self.project_out) if matrix is not None)
