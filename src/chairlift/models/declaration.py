"""A model as data: ModelConfig and the records of its layers, norms and matrices.

Weight loading, memory plan, cost model and kernel benchmarks are derived from these records. A layer consists of two
branches around the residual stream, each with norms in up to three places:

    stream = of_sum(stream + multiplier * after(branch(before(stream))))

The first branch is attention or a recurrence, or both, which read the same stream (Falcon-H1). A layer may have one
branch only (Nemotron-H), or a third one, which reads an embedding of the token for this layer (Gemma 4).

Names are those of the parameters in Hugging Face checkpoints, without `.weight` and `.bias`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from chairlift.kernels.activations import activation_kernel
from chairlift.kernels.recurrence_sizes import GatedDeltaSizes, Mamba2Sizes
from chairlift.kernels.routing import ExpertRouting
from chairlift.models.quantization import Quantization

LM_HEAD: Final = "LM head"
EMBEDDING: Final = "embedding"
ATTENTION: Final = "attention"
RECURRENCE: Final = "recurrence"
MLP: Final = "MLP"
EXPERTS: Final = "experts"
ROUTER: Final = "router"
PROJECTIONS: Final = "projections"
PER_LAYER_EMBEDDING: Final = "per-layer embeddings"
PER_LAYER_INPUTS: Final = "per-layer inputs"


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
class NormSpec:
    """A norm of rows of `size` values, with the parameters `<name>.weight` and, for LayerNorm, `<name>.bias`.

    Attributes:
        weight_offset: the number that is added to the weight of the checkpoint: 1 for Gemma's, whose weights are
            differences from 1.
        weight_multiplier: the factor of the weight of the checkpoint.
        has_bias: whether the checkpoint of a LayerNorm has the bias; otherwise it is 0.
    """

    kind: Literal["rms_norm", "layer_norm"]
    name: str
    size: int
    eps: float
    weight_offset: float = 0.0
    weight_multiplier: float = 1.0
    has_bias: bool = True

    @property
    def num_values(self) -> int:
        return self.size * (2 if self.kind == "layer_norm" else 1)


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """RMSNorm of query and key before the rotation, with the parameters `<query>.weight` and `<key>.weight`.

    Attributes:
        key: None in a layer that reads K and V of another layer.
        norms_values: whether the heads of V have an RMSNorm too, without a weight.
        weight_offset: see NormSpec.
        across_heads: whether the heads of a token are normed together, by weights [heads * head_dim], instead of each
            head by the same weights [head_dim].
    """

    query: str
    key: str | None
    eps: float
    weight_offset: float = 0.0
    across_heads: bool = False
    norms_values: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.query,) if self.key is None else (self.query, self.key)


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """Matrices with the same input, which are multiplied as one product.

    Attributes:
        group: the heading in the memory plan: ATTENTION, RECURRENCE, MLP, EXPERTS, ROUTER, PROJECTIONS,
            PER_LAYER_EMBEDDING, PER_LAYER_INPUTS, EMBEDDING or LM_HEAD.
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

    @property
    def keeps_format(self) -> bool:
        """Whether the matrix keeps the format of its file if all others are quantized.

        A router is small, and its rounding errors would choose other experts.
        """
        return self.group == ROUTER

    def of_expert(self, index: int) -> MatrixSpec:
        """The matrices of one expert; the names of this declaration have "{}" in place of its number."""
        return replace(self, parts=tuple((name.format(index), out) for name, out in self.parts))


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
        gate: the projection of the input to as many values as attention has before `output`, which are multiplied by
            the sigmoid of them; or None.
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

    @property
    def matrices(self) -> tuple[MatrixSpec, ...]:
        return (self.qkv, self.output) if self.gate is None else (self.qkv, self.gate, self.output)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """The number of values in the keys of one token. Its values, V, have the same number."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_kept_kv_heads(self) -> int:
        """The number of heads of K and V that the layer keeps in memory of its own."""
        return self.num_kv_heads if self.kv_source is None else 0

    @property
    def head_norms(self) -> tuple[NormSpec, ...]:
        """The norms of query and key before the rotation; empty without norms."""
        if (norm := self.head_norm) is None:
            return ()
        sizes = (self.query_size, self.key_size) if norm.across_heads else (self.head_dim, self.head_dim)
        named = zip(norm.names, sizes, strict=False)
        return tuple(NormSpec("rms_norm", name, size, norm.eps, norm.weight_offset) for name, size in named)


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A causal convolution of each channel, see `kernels.recurrence.Convolution`.

    Attributes:
        name: its parameters are `<name>.weight` [channels, 1, width] and, with `has_bias`, `<name>.bias` [channels].
        parts: (name, channels) of the weights that its own consists of; empty for one weight.
    """

    name: str
    channels: int
    width: int
    has_bias: bool = False
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def num_values(self) -> int:
        return self.channels * (self.width + self.has_bias)

    @property
    def num_kept_values(self) -> int:
        """The number of inputs that are a part of the state."""
        return self.channels * (self.width - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec(GatedDeltaSizes):
    """The gated delta rule, see `kernels.recurrence.GatedDelta`.

    Attributes:
        name: its parameters are `<name>.A_log` and `<name>.dt_bias`, [num_heads].
        norm: the norm of each head, of value_dim values.
        grouped_rows: the matrices of the input whose rows are grouped by key head in files: the name of each, and the
            numbers of consecutive rows of each kind in a group.
    """

    name: str
    norm: NormSpec
    grouped_rows: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def num_values(self) -> int:
        return 2 * self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(Mamba2Sizes):
    """Mamba-2, see `kernels.recurrence.Mamba2`.

    Attributes:
        name: its parameters are `<name>.A_log`, `<name>.dt_bias` and `<name>.D`, [num_heads].
        norm: the norm of num_heads * head_dim values, or None.
        projection_scales: the factors of z, x, B, C and dt, or empty.
    """

    name: str
    norm: NormSpec | None = None
    projection_scales: tuple[float, ...] = ()

    @property
    def num_values(self) -> int:
        return 3 * self.num_heads + (sum(self.row_parts) if self.projection_scales else 0)


@dataclass(frozen=True, slots=True)
class RecurrenceSpec:
    """A layer with recurrent state: output(recurrence(input(x))).

    Attributes:
        input: the projection to the rows of `kernels.recurrence`, with one part or several.
        gated_delta, mamba2: how the matrices of the state are updated; both are None in a `ShortConvolution`, which has
            none.
    """

    input: MatrixSpec
    output: MatrixSpec
    convolution: ConvolutionSpec
    gated_delta: GatedDeltaSpec | None = None
    mamba2: Mamba2Spec | None = None

    @property
    def rule(self) -> GatedDeltaSpec | Mamba2Spec | None:
        return self.gated_delta or self.mamba2

    @property
    def num_values(self) -> int:
        """The number of values of parameters, without projections and norm."""
        return self.convolution.num_values + (0 if self.rule is None else self.rule.num_values)

    @property
    def matrix_values(self) -> int:
        """The number of values in the matrices of the state of a sequence."""
        return 0 if self.rule is None else math.prod(self.rule.matrix_shape)

    @property
    def state_values(self) -> int:
        """The number of float32 values that the layer keeps for a sequence."""
        return self.convolution.num_kept_values + self.matrix_values

    @property
    def norm(self) -> NormSpec | None:
        return None if self.rule is None else self.rule.norm


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The choice of the experts of a token in a mixture of experts (Shazeer et al., 2017).

    Attributes:
        matrix: the matrix of the logits, one for each expert.
        routing: how logits become the experts of a token and their weights.
        norm: the norm of the router's input; None for that of the experts.
        expert_scales: the name of the parameter [num_experts] that the weights of experts are multiplied by, or None.
        selection_bias: the name of the parameter [num_experts] that is added to the scores for the choice of experts,
            but is no part of their weights; or None.
    """

    matrix: MatrixSpec
    routing: ExpertRouting
    norm: NormSpec | None = None
    expert_scales: str | None = None
    selection_bias: str | None = None

    @property
    def num_experts(self) -> int:
        return self.matrix.out_features


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """A feed-forward network: down(activation(up(x))), or, gated, down(activation(gate(x)) * up(x)).

    Attributes:
        up: the up projection; of a gated network gate and up, one part each or both in one, gate first.
        activation: a key of `kernels.activations.ACTIVATIONS`.
        router: None, or, of a mixture of experts, the choice of the experts whose weighted sum is the result. Then `up`
            and `down` declare every expert, and their names have "{}" in place of its number.
        gate_multiplier: the factor of gate(x), in a gated network without a router.
    """

    up: MatrixSpec
    down: MatrixSpec
    activation: str
    gated: bool
    router: RouterSpec | None = None
    gate_multiplier: float = 1.0

    @property
    def inner_size(self) -> int:
        return self.down.in_features

    @property
    def activation_kernel(self) -> str:
        """The name of the kernel that computes the activation before the down projection."""
        return activation_kernel(self.activation, self.gated)

    @property
    def experts(self) -> Iterator[tuple[MatrixSpec, MatrixSpec]]:
        """The up and down projection of each expert; the network itself if it has no router."""
        if self.router is None:
            yield self.up, self.down
            return
        for index in range(self.router.num_experts):
            yield self.up.of_expert(index), self.down.of_expert(index)

    @property
    def matrices(self) -> Iterator[MatrixSpec]:
        """Every matrix, including the router's and those of all experts."""
        if self.router is not None:
            yield self.router.matrix
        for projections in self.experts:
            yield from projections


def declare_network(
    up: tuple[tuple[str, int], ...],
    down: str,
    hidden_size: int,
    activation: str,
    *,
    gated: bool,
    has_bias: bool = False,
    group: str = MLP,
    prefix: str = "",
) -> FeedForwardSpec:
    """Return the declaration of a feed-forward network.

    Args:
        up: the parts of its first product; with `gated` gate and up, one part each or both in one.
        down: the name of its second matrix.
        prefix: the beginning of the names of both products in the kernel benchmark.
    """
    inner = sum(size for _, size in up) // (2 if gated else 1)
    return FeedForwardSpec(
        MatrixSpec(group, f"{prefix}{'gate_up' if gated else 'up'}", up, hidden_size, has_bias),
        MatrixSpec(group, f"{prefix}down", ((down, hidden_size),), inner, has_bias),
        activation,
        gated,
    )


@dataclass(frozen=True, slots=True)
class BranchNorms:
    """The norms of a branch, and its factor.

    Attributes:
        before: the norm of the branch's input.
        after: the norm of the branch's output, before it is added to the residual stream.
        of_sum: the norm of the residual stream after the addition.
        multiplier: the factor of the branch's output before it is added to the residual stream.
    """

    before: NormSpec | None = None
    after: NormSpec | None = None
    of_sum: NormSpec | None = None
    multiplier: float = 1.0

    @property
    def can_fuse_sum(self) -> bool:
        """Whether the last product of the branch can be added to the residual stream by its own kernel."""
        return self.after is None and self.multiplier == 1

    def __iter__(self) -> Iterator[NormSpec]:
        return (norm for norm in (self.before, self.after, self.of_sum) if norm is not None)


@dataclass(frozen=True, slots=True)
class PerLayerBranchSpec:
    """The branch of a layer that reads the token's input for this layer: projection(activation(gate(x)) * input).

    Attributes:
        gate: the projection of the residual stream to the size of the input.
        projection: the projection back to hidden_size.
        activation: a key of `kernels.activations.ACTIVATIONS`.
        norms: the norms after the branch and after the sum; none before it.
    """

    gate: MatrixSpec
    projection: MatrixSpec
    activation: str
    norms: BranchNorms

    @property
    def activation_kernel(self) -> str:
        """The name of the kernel that computes activation and product before the projection."""
        return activation_kernel(self.activation, gated=True)


@dataclass(frozen=True, slots=True)
class ParallelExpertsSpec:
    """A mixture of experts beside a dense feed-forward network: after_dense(dense) + after(mixture(before(x))).

    Attributes:
        feed_forward: the mixture; it has a router.
        gate: the projection of before(x) to one value, whose sigmoid the dense network is multiplied by (shared experts
            of Qwen); or None.
    """

    feed_forward: FeedForwardSpec
    before: NormSpec
    after: NormSpec | None = None
    after_dense: NormSpec | None = None
    gate: MatrixSpec | None = None

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        return tuple(norm for norm in (self.before, self.after, self.after_dense) if norm is not None)


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
        attention, recurrence: the first branch. With both, each reads the residual stream, to which both are added.
        parallel_experts: the mixture whose result is added to that of a dense feed-forward network, or None.
        per_layer_branch: the branch after the feed-forward network, or None.
        output_scale: the name of the parameter [1] that the output of the layer is multiplied by, or None.
    """

    attention: AttentionSpec | None
    attention_norms: BranchNorms
    feed_forward: FeedForwardSpec | None
    feed_forward_norms: BranchNorms
    recurrence: RecurrenceSpec | None = None
    recurrence_norms: BranchNorms = BranchNorms()
    parallel_experts: ParallelExpertsSpec | None = None
    per_layer_branch: PerLayerBranchSpec | None = None
    output_scale: str | None = None

    def beside_experts(self, mixture: FeedForwardSpec, gate: MatrixSpec | None = None) -> LayerSpec:
        """Return the layer with a mixture of experts beside its dense feed-forward network, after the same norm."""
        before = self.feed_forward_norms.before
        assert before is not None, "every branch has a norm"
        return replace(self, parallel_experts=ParallelExpertsSpec(mixture, before, gate=gate))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        """The products that every token needs, in the order of a step; those of experts are not included."""
        return *self._mixer_products, *self._network_products

    @property
    def _mixer_products(self) -> Iterator[ProductSpec]:
        """The products of the recurrence and of attention."""
        if (recurrence := self.recurrence) is not None:
            yield ProductSpec(recurrence.input, norm_prologue(self.recurrence_norms.before))
            yield ProductSpec(recurrence.output, "none", self.recurrence_adds_residual)
        if (attention := self.attention) is not None:
            before = norm_prologue(self.attention_norms.before)
            yield from (ProductSpec(matrix, before) for matrix in attention.matrices[:-1])
            yield ProductSpec(attention.output, "none", self.attention_adds_residual)

    @property
    def _network_products(self) -> Iterator[ProductSpec]:
        """The products of a dense network, of the router, of the gate beside a dense network, and of the third
        branch."""
        before = norm_prologue(self.feed_forward_norms.before)
        if (mlp := self.feed_forward) is not None and mlp.router is None:
            yield ProductSpec(mlp.up, before)
            yield ProductSpec(mlp.down, mlp.activation_kernel, self.feed_forward_adds_residual)
        if self.parallel_experts is not None:
            before = norm_prologue(self.parallel_experts.before)
        if self.mixture is not None and (router := self.mixture.router) is not None:
            yield ProductSpec(router.matrix, before if router.norm is None else router.norm.kind)
        if self.parallel_experts is not None and self.parallel_experts.gate is not None:
            yield ProductSpec(self.parallel_experts.gate, before)
        if (branch := self.per_layer_branch) is not None:
            yield ProductSpec(branch.gate, "none")
            yield ProductSpec(branch.projection, branch.activation_kernel)

    @property
    def mixture(self) -> FeedForwardSpec | None:
        """The feed-forward network with experts, or None."""
        if self.parallel_experts is not None:
            return self.parallel_experts.feed_forward
        return None if self.feed_forward is None or self.feed_forward.router is None else self.feed_forward

    @property
    def feed_forwards(self) -> tuple[FeedForwardSpec, ...]:
        """The feed-forward network, and the mixture of experts beside it, if there are any."""
        experts = self.parallel_experts
        found = (self.feed_forward, None if experts is None else experts.feed_forward)
        return tuple(network for network in found if network is not None)

    @property
    def matrices(self) -> tuple[MatrixSpec, ...]:
        """Every matrix of the layer, including those of all experts."""
        branch, recurrence = self.per_layer_branch, self.recurrence
        others = () if branch is None else (branch.gate, branch.projection)
        recurrent = () if recurrence is None else (recurrence.input, recurrence.output)
        networks = (matrix for network in self.feed_forwards for matrix in network.matrices)
        gate = None if self.parallel_experts is None else self.parallel_experts.gate
        gates = () if gate is None else (gate,)
        return *self._attention_matrices, *recurrent, *networks, *gates, *others

    @property
    def _attention_matrices(self) -> tuple[MatrixSpec, ...]:
        return () if self.attention is None else self.attention.matrices

    @property
    def adaptable(self) -> tuple[MatrixSpec, ...]:
        """The matrices that LoRA adapters can have: those of attention and of a dense feed-forward network."""
        mlp = self.feed_forward
        return *self._attention_matrices, *(() if mlp is None or mlp.router is not None else (mlp.up, mlp.down))

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """The norms of the residual stream, of the branches and of heads."""
        others = () if self.per_layer_branch is None else self.per_layer_branch.norms
        experts = self.parallel_experts
        parallel = () if experts is None else experts.norms
        router = None if self.mixture is None else self.mixture.router
        routing = () if router is None or router.norm is None else (router.norm,)
        recurrent = () if self.recurrence is None or self.recurrence.norm is None else (self.recurrence.norm,)
        heads = () if self.attention is None else self.attention.head_norms
        first = (*self.attention_norms, *heads, *self.recurrence_norms, *recurrent)
        return (*first, *self.feed_forward_norms, *parallel, *routing, *others)

    @property
    def num_values_beside_matrices(self) -> int:
        """The number of values in norms, biases, sinks, scales of experts and recurrences."""
        biases = sum(matrix.out_features for matrix in self.matrices if matrix.has_bias)
        router = None if self.mixture is None else self.mixture.router
        vectors = () if router is None else (router.expert_scales, router.selection_bias)
        scales = sum(router.num_experts for name in vectors if name is not None) if router is not None else 0
        norms = sum(norm.num_values for norm in self.norms)
        norms += sum(norm.num_values for norm in self._norms_of_gates)
        if self.attention is not None and self.attention.sinks is not None:
            norms += self.attention.num_heads
        if (recurrence := self.recurrence) is not None:
            norms += recurrence.num_values
        return norms + biases + scales

    @property
    def _norms_of_gates(self) -> Iterator[NormSpec]:
        """The norms of the inputs of gates, which have copies of their own."""
        if self.attention is not None and self.attention.gate is not None and self.attention_norms.before is not None:
            yield self.attention_norms.before
        if self.parallel_experts is not None and self.parallel_experts.gate is not None:
            yield self.parallel_experts.before

    @property
    def is_fused(self) -> bool:
        """Whether the last product of each branch can be added to the residual stream by its own kernel."""
        mixer = self.recurrence_adds_residual if self.attention is None else self.attention_adds_residual
        has_both = self.attention is not None and self.recurrence is not None
        return mixer and not has_both and self.feed_forward_adds_residual and self.per_layer_branch is None

    @property
    def attention_adds_residual(self) -> bool:
        """Whether the last product of attention is added to the residual stream by its own kernel."""
        return self.attention_norms.can_fuse_sum

    @property
    def recurrence_adds_residual(self) -> bool:
        """The same of the recurrence. Attention beside it reads the residual stream after the recurrence."""
        return self.recurrence_norms.can_fuse_sum and self.attention is None

    @property
    def feed_forward_adds_residual(self) -> bool:
        """The same of the feed-forward network. The experts of a mixture are summed up first."""
        return self.feed_forward_norms.can_fuse_sum and self.mixture is None


@dataclass(frozen=True, slots=True)
class PerLayerInputsSpec:
    """The inputs of the layers' `per_layer_branch`, of `size` values for each token and layer:

        multiplier * (norm(projection(embedding)) + table_multiplier * table[token])

    Attributes:
        table: the embedding table [vocab_size, layers * size].
        projection: the projection of the embedding to the inputs of all layers.
        norm: the norm of the projected input of a layer.
    """

    size: int
    table: MatrixSpec
    projection: MatrixSpec
    norm: NormSpec
    table_multiplier: float
    multiplier: float


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


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """The head of a cross-encoder, which computes one score from the hidden state of the first token:

        output(activation(dense(x))) or output(norm(activation(dense(x))))

    Attributes:
        dense, output: names of the matrices [hidden_size, hidden_size] and [1, hidden_size], with biases.
        activation: "tanh" or "gelu".
        norm: the norm of the result of the activation, or None.
        has_bias: whether the dense matrix has a bias.
        pooling: the hidden state that the head reads: "cls" or "mean".
    """

    dense: str
    output: str
    activation: Literal["tanh", "gelu"]
    norm: NormSpec | None = None
    has_bias: bool = True
    pooling: Literal["cls", "mean"] = "cls"


@dataclass(frozen=True, slots=True)
class PredictorSpec:
    """A layer that predicts the token after the next one (multi-token prediction, MTP; Gloeckle et al., 2024):

        head(norm(layer(projection([embedding_norm(E[next token]), hidden_norm(h)]))))

    h is the hidden state of a token after the final norm, and the layer has the position of that token. A further token
    is predicted from the result of `norm` in place of h. Embedding and head are those of the model.

    Attributes:
        layer: a layer with attention, whose K and V are beside those of the model.
    """

    layer: LayerSpec
    projection: MatrixSpec
    embedding_norm: NormSpec
    hidden_norm: NormSpec
    norm: NormSpec

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """The norms beside those of the layer."""
        return self.embedding_norm, self.hidden_norm, self.norm


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """What distinguishes an encoder from a decoder: the tokens of a text attend to one another in both directions.

    Attributes:
        embedding_norm: the norm of the sum of embeddings.
        token_types: the table of token types, whose first row is that of single texts; or None.
        classifier: the head of a cross-encoder, or None.
    """

    embedding_norm: NormSpec
    token_types: PositionTableSpec | None = None
    classifier: ClassifierSpec | None = None


def norm_prologue(norm: NormSpec | None) -> str:
    """Return the name of the prologue that computes `norm`."""
    return "none" if norm is None else norm.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The declaration of a text model, and the special tokens of its checkpoint.

    Attributes:
        architecture: a key of `models.registry.ARCHITECTURES` ("llama", "opt"), which the registry adds.
        name: the model type in the file ("llama", "mistral", "qwen2", "qwen3", "opt").
        embedding: the embedding table [vocab_size, width of a word vector].
        head: the matrix that computes the logits; with tie_word_embeddings it is the embedding's.
        final_norm: the norm before the head, or before project_out if there is one.
        project_in, project_out: the projections from the width of a word vector to hidden_size and back, or None if the
            widths are equal.
        embedding_multiplier, logits_multiplier: the factors of the embedding's and of the head's output.
        logits_soft_cap: c in c * tanh(logits / c), which is applied after the multiplier, or None.
        unneeded_modules: the modules of which checkpoints may have parameters that no layer needs.
        per_layer_inputs: the embeddings that layers read in their `per_layer_branch`, or None.
        encoder: what the model has as an encoder; None for a decoder, whose tokens attend to earlier ones.
        predictor: the layer that proposes draft tokens; None if there is none, or none is needed.
        eos_token_ids: all tokens that end a sequence, including those of generation_config.json.
        dtype: the type of the file's tensors ("float32", "float16", "bfloat16"); "float16" if they are quantized.
        quantization: the quantization of a Hugging Face checkpoint, or None.
    """

    name: str
    architecture: str = ""
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
    unneeded_modules: tuple[str, ...] = ()
    per_layer_inputs: PerLayerInputsSpec | None = None
    encoder: EncoderSpec | None = None
    predictor: PredictorSpec | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    quantization: Quantization | None = None

    def with_recurrences(self, recurrent: Sequence[bool], declare: Callable[[int], RecurrenceSpec]) -> ModelConfig:
        """Return the declaration with a recurrence in place of attention in some layers, under the same norms.

        Args:
            recurrent: whether each layer has a recurrence.
            declare: index of a layer -> its recurrence.
        """
        layers = list(self.layers)
        for index in range(len(layers)):
            if recurrent[index]:
                layers[index] = replace(
                    layers[index],
                    attention=None,
                    attention_norms=BranchNorms(),
                    recurrence=declare(index),
                    recurrence_norms=layers[index].attention_norms,
                )
        return replace(self, layers=tuple(layers))

    @property
    def vocab_size(self) -> int:
        return self.embedding.out_features

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """The layers, and that of the predictor, whose index is the number of the others."""
        return self.layers if self.predictor is None else (*self.layers, self.predictor.layer)

    @property
    def kv_values_per_token(self) -> int:
        """The number of K and V values of one token in all layers."""
        return sum(2 * spec.num_kept_kv_heads * spec.head_dim for spec in self.attention_specs.values())

    @property
    def attention_specs(self) -> dict[int, AttentionSpec]:
        """The attention of each layer that has one, by the index of the layer; that of the predictor comes last."""
        layers = enumerate(self.all_layers)
        return {index: layer.attention for index, layer in layers if layer.attention is not None}

    @property
    def state_values_per_sequence(self) -> int:
        """The number of float32 values of recurrent state of a sequence in all layers."""
        return sum(layer.recurrence.state_values for layer in self.layers if layer.recurrence is not None)

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The distinct rotary embeddings, each with the head size that it rotates."""
        found = ((spec.rope, spec.head_dim) for spec in self.attention_specs.values())
        return tuple(dict.fromkeys((rope, head_dim) for rope, head_dim in found if rope is not None))

    @property
    def matrices(self) -> Iterator[MatrixSpec]:
        """Every matrix in memory, each once. A tied head shares the embedding's matrix."""
        yield self.embedding
        if self.per_layer_inputs is not None:
            yield self.per_layer_inputs.table
        for layer in self.all_layers:
            yield from layer.matrices
        yield from self._projections
        if not self.tie_word_embeddings:
            yield self.head

    @property
    def read_matrices(self) -> Iterator[MatrixSpec]:
        """Every matrix that a step reads completely, including the head's. Of embedding tables a step reads some
        rows."""
        for layer in self.all_layers:
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
        """The names of all norms."""
        for layer in self.all_layers:
            yield from (norm.name for norm in layer.norms)
        if self.per_layer_inputs is not None:
            yield self.per_layer_inputs.norm.name
        if self.final_norm is not None:
            yield self.final_norm.name
        if self.predictor is not None:
            yield from (norm.name for norm in self.predictor.norms)
        if self.encoder is not None:
            yield self.encoder.embedding_norm.name
            if (classifier := self.encoder.classifier) is not None and classifier.norm is not None:
                yield classifier.norm.name

    @property
    def _projections(self) -> tuple[MatrixSpec, ...]:
        inputs = None if self.per_layer_inputs is None else self.per_layer_inputs.projection
        predicting = None if self.predictor is None else self.predictor.projection
        found = (self.project_in, self.project_out, inputs, predicting)
        return tuple(matrix for matrix in found if matrix is not None)
