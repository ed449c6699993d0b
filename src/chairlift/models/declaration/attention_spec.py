"""The attention of a layer: its projections, norms of heads, rotary embedding and window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.kernels.activations import GateActivation
from chairlift.models.declaration.matrix_spec import ATTENTION, MatrixSpec, NormSpec, StoredRows


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its scaling.

    Attributes:
        scaling: "none", "linear" (uses factor), "llama3" (uses factor, low_freq_factor, high_freq_factor and
            original_max_position_embeddings), "yarn" (Peng et al., 2023; uses factor, beta_fast, beta_slow, truncate
            and original_max_position_embeddings), "factors" (uses freq_factors), or "longrope" (Ding et al., 2024; uses
            freq_factors, or long_factors if sequences may be longer than original_max_position_embeddings).
        freq_factors, long_factors: divisors, one for each inverse frequency. GGUF files store the llama3 scaling in
            this form (tensor `rope_freqs.weight`).
        rotary_dim: the number of first dimensions of a head that are rotated; None for all.
        truncate: whether the range of dimensions that YaRN interpolates is rounded to whole dimensions.
        attention_factor: the factor of all cosines and sines.
        query_scaling_beta: b, where a query at position p is multiplied by 1 + b * log(1 + floor(p / n)) with
            n = original_max_position_embeddings, as in Llama 4; 0 for no factor.
    """

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    freq_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotary_dim: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    query_scaling_beta: float = 0.0

    @property
    def scales_queries(self) -> bool:
        """Whether queries are multiplied by a factor that depends on their position."""
        return self.query_scaling_beta != 0

    def num_dims(self, head_dim: int) -> int:
        """The number of dimensions of a head that are rotated."""
        return head_dim if self.rotary_dim is None else self.rotary_dim


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """RMSNorm of query and key, with the parameters `<query>.weight` and `<key>.weight`.

    Attributes:
        query: None for norms without parameters, see NormSpec.
        key: None as well, or in a layer that reads K and V of another layer.
        norms_values: whether the heads of V have an RMSNorm too, without a weight.
        follows_rotation: whether the norm comes after the rotation instead of before it (HunYuan).
        weight_offset: see NormSpec.
        across_heads: whether the heads of a token are normed together, by weights [heads * head_dim], instead of each
            head by the same weights [head_dim].
    """

    query: str | None
    key: str | None
    eps: float
    weight_offset: float = 0.0
    across_heads: bool = False
    norms_values: bool = False
    follows_rotation: bool = False

    @property
    def names(self) -> tuple[str | None, ...]:
        return (self.query,) if self.key is None and self.query is not None else (self.query, self.key)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024), in the form that keeps one key for all heads:

        key     = [R(rotated key) | norm(latent)], which `AttentionSpec.qkv` projects
        query   = [R(rotated_queries_h(c)) | keys_h(queries(c)_h)]      of head h; c = norm(query_in(x)) or x
        output  = [values_h(latent part of the weighted sum of keys)]   of all heads

    Attributes:
        query_in, query_norm: the projection to c and its norm, or None.
        queries: the parts of all query heads that are not rotated.
        rotated_queries, keys, values: the matrices of each head; their names have "{}" in place of its number.
        key_norm: the norm of the latent.
        stored: the parameters that files have as a part of a larger matrix.
    """

    queries: MatrixSpec
    rotated_queries: MatrixSpec
    keys: MatrixSpec
    values: MatrixSpec
    key_norm: NormSpec
    query_in: MatrixSpec | None = None
    query_norm: NormSpec | None = None
    stored: Mapping[str, StoredRows] = field(default_factory=dict, hash=False)

    def matrices(self, num_heads: int) -> tuple[MatrixSpec, ...]:
        """Every matrix, including the matrices of all heads."""
        by_head = (self.rotated_queries, self.keys, self.values)
        whole = (self.queries,) if self.query_in is None else (self.query_in, self.queries)
        return *whole, *(matrix.of_expert(head) for matrix in by_head for head in range(num_heads))

    def num_row_values(self, num_heads: int) -> int:
        """The number of values of a token in the results of these products, without the query."""
        inner = 0 if self.query_in is None else self.query_in.out_features
        return inner + self.queries.out_features + num_heads * self.values.out_features


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention over paged KV memory.

    Attributes:
        qkv: the projections of query, key and value, one part each or all in one. Without a projection of the value,
            the projected keys are the values as well; a layer with a kv_source has the projection of the query only.
        scale: the factor of the products of query and key.
        rope: the rotary embedding of query and key, or None.
        sliding_window: the number of keys that a query attends to, including its own, or None for all preceding keys.
        head_norm: the norm of query and key heads, or None.
        logits_soft_cap: c in c * tanh(score / c), which is applied to the scores before the softmax, or None.
        kv_source: the index of the earlier layer whose K and V this layer reads instead of its own, or None.
        sinks: the name of a parameter with a score for each query head, which is part of the softmax but has no value;
            or None.
        gate: the projection of the input to gates, or None. The values that attention has before `output` are
            multiplied by gate_activation(gates), each gate as many consecutive values: one each, or those of a head.
        gate_activation: "sigmoid" or "softplus".
        latent: the further projections of multi-head latent attention, whose values are its keys; or None.
    """

    qkv: MatrixSpec
    output: MatrixSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None = None
    sliding_window: int | None = None
    head_norm: HeadNormSpec | None = None
    logits_soft_cap: float | None = None
    kv_source: int | None = None
    sinks: str | None = None
    gate: MatrixSpec | None = None
    gate_activation: GateActivation = "sigmoid"
    latent: LatentSpec | None = None

    @property
    def matrices(self) -> tuple[MatrixSpec, ...]:
        further = () if self.latent is None else self.latent.matrices(self.num_heads)
        return (self.qkv, *further, *(() if self.gate is None else (self.gate,)), self.output)

    @property
    def adaptable(self) -> tuple[MatrixSpec, ...]:
        """The matrices that LoRA adapters can have. Matrices that are a part of one in a file have none."""
        if self.latent is None:
            return self.matrices
        return tuple(matrix for matrix in (self.latent.query_in, self.output) if matrix is not None)

    @property
    def num_inner_values(self) -> int:
        """The number of values of a token between the products of latent attention, and in its gates."""
        gates = 0 if self.gate is None else self.gate.out_features
        return gates + (0 if self.latent is None else self.latent.num_row_values(self.num_heads))

    @property
    def num_kept_values(self) -> int:
        """The number of values of K and V of one token in memory of the layer."""
        return self.num_kept_memories * self.num_kept_kv_heads * self.head_dim

    @property
    def num_kept_memories(self) -> int:
        """2 for K and V, or 1 if the keys are the values."""
        return 2 if self.latent is None else 1

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def row_size(self) -> int:
        """The number of values of query, key and value of one token, which the kernel of attention reads."""
        return self.qkv.out_features if self.latent is None else self.query_size + self.key_size

    @property
    def key_size(self) -> int:
        """The number of values in the keys of one token. Its values, V, have the same number."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_kept_kv_heads(self) -> int:
        """The number of heads of K and V that the layer keeps in its own memory."""
        return self.num_kv_heads if self.kv_source is None else 0

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """The norms of heads, of the latent and of what queries are projected from."""
        latent = () if self.latent is None else (self.latent.query_norm, self.latent.key_norm)
        return *self.head_norms, *(norm for norm in latent if norm is not None)

    @property
    def head_norms(self) -> tuple[NormSpec, ...]:
        """The norms of query and key; empty without norms."""
        if (norm := self.head_norm) is None:
            return ()
        sizes = (self.query_size, self.key_size) if norm.across_heads else (self.head_dim, self.head_dim)
        named = zip(norm.names, sizes, strict=False)
        return tuple(NormSpec("rms_norm", name, size, norm.eps, norm.weight_offset) for name, size in named)


def declare_attention(
    qkv: tuple[tuple[str, int], ...], output: str, hidden_size: int, num_heads: int, bias: bool = False, **others: Any
) -> AttentionSpec:
    """Return the declaration of attention whose heads divide hidden_size. `others` are further attributes."""
    head_dim = hidden_size // num_heads
    return AttentionSpec(
        qkv=MatrixSpec(ATTENTION, "qkv", qkv, hidden_size, bias),
        output=MatrixSpec(ATTENTION, "output", ((output, hidden_size),), hidden_size, bias),
        num_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        **{"num_kv_heads": num_heads, **others},
    )
