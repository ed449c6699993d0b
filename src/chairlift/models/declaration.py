"""The layers, norms and matrices of a model as data.

Weight loading, memory plan, cost model and kernel benchmarks are derived from these records. A layer consists of two
branches around the residual stream, each with norms in up to three places:

    stream = of_sum(stream + multiplier * after(branch(before(stream))))

Names are those of the parameters in Hugging Face checkpoints, without `.weight` and `.bias`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from chairlift.kernels.activations import activation_kernel

LM_HEAD: Final = "LM head"
EMBEDDING: Final = "embedding"
ATTENTION: Final = "attention"
MLP: Final = "MLP"
PROJECTIONS: Final = "projections"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its scaling.

    Attributes:
        scaling: "none", "linear" (uses factor), "llama3" (uses factor, low_freq_factor, high_freq_factor and
            original_max_position_embeddings), or "factors" (uses freq_factors).
        freq_factors: head_dim / 2 divisors, one for each inverse frequency. GGUF files store the llama3 scaling in this
            form (tensor `rope_freqs.weight`).
    """

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    freq_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm of rows of `size` values, with the parameters `<name>.weight` and, for LayerNorm, `<name>.bias`."""

    kind: Literal["rms_norm", "layer_norm"]
    name: str
    size: int
    eps: float

    @property
    def num_values(self) -> int:
        return self.size * (2 if self.kind == "layer_norm" else 1)


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """RMSNorm of each query and key head before the rotation, with `<query>.weight` and `<key>.weight` [head_dim]."""

    query: str
    key: str
    eps: float


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """Matrices with the same input, which are multiplied as one product.

    Attributes:
        group: the heading in the memory plan: ATTENTION, MLP, PROJECTIONS, EMBEDDING or LM_HEAD.
        kernel: the name of the product in the kernel benchmark: "qkv", "output", "gate_up", ...
        parts: (name, output features) of each matrix, in the order of the output.
        has_bias: whether every part has a bias.
    """

    group: str
    kernel: str
    parts: tuple[tuple[str, int], ...]
    in_features: int
    has_bias: bool = False

    @property
    def out_features(self) -> int:
        return sum(out for _, out in self.parts)

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of the parameters, with `.weight`."""
        return tuple(f"{name}.weight" for name, _ in self.parts)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention over paged KV memory.

    Attributes:
        qkv: the projections of query, key and value, one part each.
        scale: the factor of the products of query and key.
        rope: the rotary embedding of query and key, or None.
        sliding_window: the number of keys that a query attends to, including its own, or None for all preceding keys.
        head_norm: the norm of each query and key head, or None.
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

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """The number of values in the keys of one token. Its values, V, have the same number."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """A feed-forward network: down(activation(up(x))), or, gated, down(activation(gate(x)) * up(x)).

    Attributes:
        up: the up projection; of a gated network gate and up, one part each, gate first.
        activation: a key of `kernels.activations.ACTIVATIONS`.
    """

    up: MatrixSpec
    down: MatrixSpec
    activation: str
    gated: bool

    @property
    def inner_size(self) -> int:
        return self.down.in_features

    @property
    def activation_kernel(self) -> str:
        """The name of the kernel that computes the activation before the down projection."""
        return activation_kernel(self.activation, self.gated)


@dataclass(frozen=True, slots=True)
class BranchNorms:
    """The norms of a branch.

    Attributes:
        before: the norm of the branch's input.
        after: the norm of the branch's output, before it is added to the residual stream.
        of_sum: the norm of the residual stream after the addition.
    """

    before: NormSpec | None = None
    after: NormSpec | None = None
    of_sum: NormSpec | None = None

    def __iter__(self) -> Iterator[NormSpec]:
        return (norm for norm in (self.before, self.after, self.of_sum) if norm is not None)


@dataclass(frozen=True, slots=True)
class ProductSpec:
    """A matrix product of a step, with the operations that its kernel fuses.

    Attributes:
        prologue: the function of a row before the product: "none", the kind of a norm, or an activation kernel.
        adds_residual: whether the kernel adds the product to the residual stream.
    """

    matrix: MatrixSpec
    prologue: str
    adds_residual: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        residual_multiplier: the factor of both branches' outputs before they are added to the residual stream.
    """

    attention: AttentionSpec
    attention_norms: BranchNorms
    feed_forward: FeedForwardSpec
    feed_forward_norms: BranchNorms
    residual_multiplier: float = 1.0

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        """The products of the layer, in the order of a step."""
        attention, mlp = self.attention, self.feed_forward
        return (
            ProductSpec(attention.qkv, norm_prologue(self.attention_norms.before)),
            ProductSpec(attention.output, "none", self._adds_residual(self.attention_norms)),
            ProductSpec(mlp.up, norm_prologue(self.feed_forward_norms.before)),
            ProductSpec(mlp.down, mlp.activation_kernel, self._adds_residual(self.feed_forward_norms)),
        )

    @property
    def matrices(self) -> tuple[MatrixSpec, ...]:
        return tuple(product.matrix for product in self.products)

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """The norms of the residual stream and of the branches; norms of heads are not included."""
        return (*self.attention_norms, *self.feed_forward_norms)

    @property
    def num_values_beside_matrices(self) -> int:
        """The number of values in norms and biases."""
        head_norms = 0 if self.attention.head_norm is None else 2 * self.attention.head_dim
        biases = sum(matrix.out_features for matrix in self.matrices if matrix.has_bias)
        return sum(norm.num_values for norm in self.norms) + biases + head_norms

    @property
    def is_fused(self) -> bool:
        """Whether the last product of each branch can be added to the residual stream by its own kernel."""
        return self._adds_residual(self.attention_norms) and self._adds_residual(self.feed_forward_norms)

    def _adds_residual(self, norms: BranchNorms) -> bool:
        return norms.after is None and self.residual_multiplier == 1


@dataclass(frozen=True, slots=True)
class PositionTableSpec:
    """Learned positions. Row `position + offset` of `<name>.weight` [rows, size] is added to the embedding."""

    name: str
    rows: int
    size: int
    offset: int

    @property
    def num_values(self) -> int:
        return self.rows * self.size


def norm_prologue(norm: NormSpec | None) -> str:
    """Return the name of the prologue that computes `norm`."""
    return "none" if norm is None else norm.kind
