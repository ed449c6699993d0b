"""What a model computes, as data: the records from which weight loading, memory plan, cost model and kernel benchmarks
are derived.

A layer is two branches around the residual stream, each with norms in up to three places:

    stream = of_sum(stream + multiplier * after(branch(before(stream))))

Names are those of Hugging Face's parameters, without `.weight` and `.bias`.
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

    `scaling` is "none", "linear" (factor), "llama3" (factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings), or "factors" (freq_factors).

    Attributes:
        freq_factors: head_dim / 2 numbers; inverse frequency i is divided by entry i. GGUF files carry the llama3
            scaling that way (tensor `rope_freqs.weight`).
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
    """A normalization of rows of `size` values: `<name>.weight`, and `<name>.bias` of LayerNorm."""

    kind: Literal["rms_norm", "layer_norm"]
    name: str
    size: int
    eps: float

    @property
    def num_values(self) -> int:
        return self.size * (2 if self.kind == "layer_norm" else 1)


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """RMSNorm over each head of query and key, before the rotation: `<query>.weight` and `<key>.weight` [head_dim]."""

    query: str
    key: str
    eps: float


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """Matrices over the same input, multiplied as one product.

    Attributes:
        group: the heading that the memory plan counts it under: ATTENTION, MLP, PROJECTIONS, EMBEDDING or LM_HEAD.
        kernel: what the kernel benchmark calls the product: "qkv", "output", "gate_up", ...
        parts: (name, output features) of each matrix, in the order of the output.
        has_bias: every part has a bias.
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
    def num_bias_values(self) -> int:
        return self.out_features if self.has_bias else 0

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the parameters, as files have them."""
        return tuple(f"{name}.weight" for name, _ in self.parts)


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """The state of an attention layer: K and V of every token, in blocks."""

    num_kv_heads: int
    head_dim: int

    @property
    def values_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention over paged KV memory.

    Attributes:
        qkv: the projections of query, key and value, one part each.
        scale: of the products of query and key.
        rope: None leaves query and key as they are.
        sliding_window: keys that a query sees, itself included; None: all up to itself.
        head_norm: None: none.
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
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """down(activation(up(x))); gated: down(activation(gate(x)) * up(x)).

    Attributes:
        up: gated: gate and up, one part each, gate first.
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
        """The prologue of the down projection."""
        return activation_kernel(self.activation, self.gated)


@dataclass(frozen=True, slots=True)
class BranchNorms:
    """The norms of a branch: of its input, of its output before it is added to the stream, and of the sum."""

    before: NormSpec | None = None
    after: NormSpec | None = None
    of_sum: NormSpec | None = None

    def __iter__(self) -> Iterator[NormSpec]:
        return (norm for norm in (self.before, self.after, self.of_sum) if norm is not None)


@dataclass(frozen=True, slots=True)
class ProductSpec:
    """A product as a step computes it.

    Attributes:
        prologue: what happens to a row first: "none", the kind of a norm, or an activation kernel.
        is_added: the product is added to the residual stream in the same call.
    """

    matrix: MatrixSpec
    prologue: str
    is_added: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        residual_multiplier: of what both branches add to the stream.
    """

    attention: AttentionSpec
    attention_norms: BranchNorms
    feed_forward: FeedForwardSpec
    feed_forward_norms: BranchNorms
    residual_multiplier: float = 1.0

    @property
    def state(self) -> KVBlocks:
        """What the layer keeps of every token."""
        return KVBlocks(self.attention.num_kv_heads, self.attention.head_dim)

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        """In the order of a step."""
        attention, mlp = self.attention, self.feed_forward
        return (
            ProductSpec(attention.qkv, norm_prologue(self.attention_norms.before)),
            ProductSpec(attention.output, "none", self._is_added(self.attention_norms)),
            ProductSpec(mlp.up, norm_prologue(self.feed_forward_norms.before)),
            ProductSpec(mlp.down, mlp.activation_kernel, self._is_added(self.feed_forward_norms)),
        )

    @property
    def matrices(self) -> tuple[MatrixSpec, ...]:
        return tuple(product.matrix for product in self.products)

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """Of the residual stream; those of heads are not among them."""
        return (*self.attention_norms, *self.feed_forward_norms)

    @property
    def num_values_beside_matrices(self) -> int:
        """Norms and biases."""
        head_norms = 0 if self.attention.head_norm is None else 2 * self.attention.head_dim
        biases = sum(matrix.num_bias_values for matrix in self.matrices)
        return sum(norm.num_values for norm in self.norms) + biases + head_norms

    @property
    def is_fused(self) -> bool:
        """Every product's result is its branch's last, so that it can be added to the stream in the same call."""
        return self._is_added(self.attention_norms) and self._is_added(self.feed_forward_norms)

    def _is_added(self, norms: BranchNorms) -> bool:
        return norms.after is None and self.residual_multiplier == 1


@dataclass(frozen=True, slots=True)
class PositionTableSpec:
    """Learned positions: row `position + offset` of `<name>.weight` [rows, size] is added to the embedding."""

    name: str
    rows: int
    size: int
    offset: int

    @property
    def num_values(self) -> int:
        return self.rows * self.size


def norm_prologue(norm: NormSpec | None) -> str:
    """The prologue that computes `norm`."""
    return "none" if norm is None else norm.kind
