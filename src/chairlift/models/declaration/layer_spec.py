"""One layer of a model.

A layer consists of two branches around the residual stream, each with norms in up to three places:

    stream = of_sum(stream + multiplier * after(branch(before(stream))))

The first branch is attention or a recurrence, or both, which read the same stream (Falcon-H1). A layer may have one
branch only (Nemotron-H), or a third one, which reads an embedding of the token for this layer (Gemma 4). Both branches
may read the same stream (Cohere).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from chairlift.kernels.activations import activation_kernel
from chairlift.models.declaration.attention_spec import AttentionSpec
from chairlift.models.declaration.feed_forward_spec import FeedForwardSpec, ParallelExpertsSpec
from chairlift.models.declaration.matrix_spec import MatrixSpec, NormSpec
from chairlift.models.declaration.recurrence_spec import RecurrenceSpec


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
class LayerSpec:
    """One decoder layer.

    Attributes:
        attention, recurrence: the first branch. With both, each reads the residual stream, to which both are added.
        is_parallel: whether the feed-forward network reads the residual stream before attention is added to it.
        parallel_experts: the mixture whose result is added to the result of a dense feed-forward network, or None.
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
    is_parallel: bool = False

    def beside_experts(self, mixture: FeedForwardSpec, gate: MatrixSpec | None = None) -> LayerSpec:
        """Return the layer with a mixture of experts beside its dense feed-forward network, after the same norm."""
        before = self.feed_forward_norms.before
        assert before is not None, "every branch has a norm"
        return replace(self, parallel_experts=ParallelExpertsSpec(mixture, before, gate=gate))

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
        """Every matrix of the layer, including the matrices of all experts."""
        branch, recurrence = self.per_layer_branch, self.recurrence
        others = () if branch is None else (branch.gate, branch.projection)
        recurrent = () if recurrence is None else recurrence.matrices
        networks = (matrix for network in self.feed_forwards for matrix in network.matrices)
        gate = None if self.parallel_experts is None else self.parallel_experts.gate
        gates = () if gate is None else (gate,)
        attention = () if self.attention is None else self.attention.matrices
        return *attention, *recurrent, *networks, *gates, *others

    @property
    def adaptable(self) -> tuple[MatrixSpec, ...]:
        """The matrices that LoRA adapters can have: those of attention, of the recurrence and of a dense feed-forward
        network, the gate of shared experts, and the projections to and from the space of experts."""
        mlp, experts, recurrence = self.feed_forward, self.parallel_experts, self.recurrence
        latent = () if self.mixture is None else self.mixture.latent or ()
        attention = () if self.attention is None else self.attention.adaptable
        recurrent = () if recurrence is None else recurrence.matrices
        gates = () if experts is None or experts.gate is None else (experts.gate,)
        return (
            *attention,
            *recurrent,
            *(() if mlp is None or mlp.router is not None else (mlp.up, mlp.down)),
            *gates,
            *latent,
        )

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """The norms of the residual stream, of the branches and within attention."""
        others = () if self.per_layer_branch is None else self.per_layer_branch.norms
        experts = self.parallel_experts
        parallel = () if experts is None else experts.norms
        router = None if self.mixture is None else self.mixture.router
        routing = () if router is None or router.norm is None else (router.norm,)
        recurrent = () if self.recurrence is None or self.recurrence.norm is None else (self.recurrence.norm,)
        attention = () if self.attention is None else self.attention.norms
        first = (*self.attention_norms, *attention, *self.recurrence_norms, *recurrent)
        return (*first, *self.feed_forward_norms, *parallel, *routing, *others)

    @property
    def num_values_beside_matrices(self) -> int:
        """The number of values in norms, biases, sinks, scales of experts and recurrences."""
        biases = sum(matrix.out_features for matrix in self.matrices if matrix.has_bias)
        router = None if self.mixture is None else self.mixture.router
        vectors = () if router is None else (router.expert_scales, router.selection_bias)
        scales = sum(router.num_experts for name in vectors if name is not None) if router is not None else 0
        norms = sum(norm.num_values for norm in self.norms)
        norms += sum(norm.num_values for norm in self._copied_norms)
        if self.attention is not None and self.attention.sinks is not None:
            norms += self.attention.num_heads
        if (recurrence := self.recurrence) is not None:
            norms += recurrence.num_values
        return norms + biases + scales

    @property
    def _copied_norms(self) -> Iterator[NormSpec]:
        """The norms of the inputs of further products, which have separate copies."""
        attention, before = self.attention, self.attention_norms.before
        if attention is not None and before is not None:
            if attention.gate is not None:
                yield before
            if attention.latent is not None:
                yield from (before, *[attention.latent.query_norm or before] * attention.num_heads)
        if (experts := self.parallel_experts) is not None:
            num_copies = (experts.gate is not None) + (experts.feed_forward.latent is not None)
            yield from (experts.before,) * num_copies

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
        """The same of the feed-forward network. Experts are summed up first; a parallel network precedes attention."""
        return self.feed_forward_norms.can_fuse_sum and self.mixture is None and not self.is_parallel
