"""The feed-forward network of a layer, dense or a mixture of experts, and a mixture beside a dense one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chairlift.kernels.activations import activation_kernel
from chairlift.kernels.routing import ExpertRouting
from chairlift.models.declaration.matrix_spec import MLP, MatrixSpec, NormSpec


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The choice of the experts of a token in a mixture of experts (Shazeer et al., 2017).

    Attributes:
        matrix: the matrix of the logits, one for each expert.
        routing: how logits become the experts of a token and their weights.
        norm: the norm of the router's input; None if the router shares the experts' norm.
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
        parameters: those of the activation (`Prologue.parameters`), in a network without a router: numbers, or the
            names of parameters of the checkpoint with one value each.
        latent: of a mixture beside a dense network whose experts work in a narrower space, the projection of x to it
            and that of the weighted sum back, or None. The router reads x.
    """

    up: MatrixSpec
    down: MatrixSpec
    activation: str
    gated: bool
    router: RouterSpec | None = None
    parameters: tuple[float | str, ...] = ()
    latent: tuple[MatrixSpec, MatrixSpec] | None = None

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
        """Every matrix, including the matrices of the router and of all experts."""
        if self.router is not None:
            yield self.router.matrix
        yield from self.latent or ()
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
