"""The interface of a kernel set. Layers and models call its functions and do not depend on which set it is.

A linear layer is the prologue of each row, the product with a matrix, and the sum with a residual:

    x [T, in] -> prologue -> product with a matrix [out, in] -> + bias -> + residual -> [T, out]

Norms and activation functions belong to the product that follows them: its kernel reads the row there anyway, and a
kernel that multiplies integers quantizes it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch

from chairlift.kernels.activations import GateActivation
from chairlift.kernels.attention import AttentionBackend, AttentionShape, StepContext
from chairlift.kernels.lora import LoraLayer
from chairlift.kernels.recurrence import Recurrence, RecurrentKernel
from chairlift.kernels.routing import ExpertRouting
from chairlift.kernels.weights import MatrixParts, Weights

NORM_KINDS: Final = ("rms_norm", "layer_norm")
RowKernel = Callable[[torch.Tensor], torch.Tensor]
"""A function of rows, [T, n] -> [T, m]; the result of a row depends on this row alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Prologue:
    """What a linear layer does to each row first.

    Attributes:
        kind: "none", one of NORM_KINDS, or a row kernel of `kernels.activations`: a gated one takes rows twice as wide
            as it gives; all others leave the width.
        weight: [in], the weight of a norm.
        bias: [in], the bias of "layer_norm".
        eps: the epsilon of a norm.
        parameters: the factor of the gate of a gated row kernel, 1 if it is missing; alpha_p, alpha_n, beta and eps of
            "xielu", as in checkpoints.
    """

    kind: str
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float = 0.0
    parameters: tuple[float, ...] = ()


NO_PROLOGUE = Prologue("none")


class LinearKernel(Protocol):
    """A linear layer and its prologue."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """linear(prologue(x)), plus `residual` [T, out] unless it is None.

        The sum may be computed in the memory of `residual`, whose values are lost. The next call of a layer of the same
        name (`q_proj`, `down_proj`...) may overwrite the result, unless it is written to `out`, which has no residual.
        """
        ...


class ComposedLinear:
    """A `LinearKernel` that calls a prologue, a product with the bias, and a sum one after the other."""

    def __init__(self, prologue: RowKernel, product: RowKernel) -> None:
        self._prologue = prologue
        self._product = product

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self._product(self._prologue(x))
        if out is not None:
            return out.copy_(y)
        return y if residual is None else residual.add_(y)


def call_each(layers: Sequence[LinearKernel], xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Write layer(x) of each layer to its `out`; see `Kernels.call_each`."""
    for layer, x, out in zip(layers, xs, outs, strict=True):
        layer(x, out=out)


FeedForwardKernel = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [T, in], a residual [T, in] or None) -> the network of x, plus the residual, which the caller gives up."""


def compose_feed_forward(up: LinearKernel, down: LinearKernel) -> FeedForwardKernel:
    """Return a `FeedForwardKernel` that calls both layers one after the other."""
    return partial(_feed_forward, up, down)


def _feed_forward(up: LinearKernel, down: LinearKernel, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return down(up(x), residual)


ResidualSumKernel = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(stream, branch) [T, hidden_size] -> scale * of_sum(stream + multiplier * after(branch)), the sum of the residual
stream and the branch of a layer. The values of both arguments are lost; a branch of None adds nothing."""


class ComposedResidualSum:
    """A `ResidualSumKernel` that calls a norm, a sum and a norm one after the other.

    Args:
        after, of_sum: norms or none.
        make_prologue: returns the kernel of a norm.
    """

    def __init__(
        self,
        after: Prologue,
        of_sum: Prologue,
        multiplier: float,
        scale: float = 1.0,
        *,
        make_prologue: Callable[[Prologue], RowKernel],
    ) -> None:
        self._after, self._of_sum = make_prologue(after), make_prologue(of_sum)
        self._multiplier, self._scale = multiplier, scale

    def __call__(self, stream: torch.Tensor, branch: torch.Tensor | None) -> torch.Tensor:
        if branch is not None:
            stream.add_(self._after(branch), alpha=self._multiplier)
        total = self._of_sum(stream)
        return total if self._scale == 1 else total.mul_(self._scale)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedMatrix:
    """A matrix of `Kernels.load_matrix`, and its bias [out] or None."""

    matrix: Any
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """The parameters of a mixture of experts: the sum of weight * down(activation(up(norm(x)))) over chosen experts.

    Attributes:
        norm: the norm of the input of router and experts, or none.
        router: the matrix [num_experts, in] of the logits; `in` is that of `MixtureKernel.routed`.
        experts: the up and down projection of each expert. A kernel set converts one expert after the other, so an
            iterator need not hold all of them.
        activation: the row kernel between the projections.
        router_norm: the norm of the router's input; None for `norm`.
        expert_scales: [num_experts], the factors of the weights of experts, or None.
        selection_bias: [num_experts], is added to the scores for the choice of experts only; or None.
    """

    norm: Prologue
    router: LoadedMatrix
    experts: Iterable[tuple[LoadedMatrix, LoadedMatrix]]
    activation: str
    routing: ExpertRouting
    router_norm: Prologue | None = None
    expert_scales: torch.Tensor | None = None
    selection_bias: torch.Tensor | None = None


class MixtureKernel(Protocol):
    """A mixture of experts."""

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the mixture of x [T, in]. The router reads `routed` [T, its own in], or x if it is None."""
        ...


Layer = Callable[[torch.Tensor, StepContext], torch.Tensor]
"""(x [T, hidden_size], the context of the step) -> [T, hidden_size]; x may be overwritten."""


def run_in_order(layers: Sequence[Layer], x: torch.Tensor, step: StepContext) -> torch.Tensor:
    """Call the layers one after the other, each with the result of the layer before."""
    for layer in layers:
        x = layer(x, step)
    return x


def _new_rows(x: torch.Tensor, purpose: str, width: int) -> torch.Tensor:
    return x.new_empty((len(x), width))


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a step. `tests/support/reference_kernels.py` in the source repository defines their results.

    `load_matrix` returns a matrix in the form that the set multiplies fastest. Embedding and LM head share one matrix
    where they are tied.

    Attributes:
        load_matrix: (weights, parts, in_features) -> matrix.
        load_router: `load_matrix` for a matrix that keeps the format of its file if all others are quantized.
        make_embedding: (matrix) -> int64 ids [T] -> rows [T, in].
        make_linear: (matrix, bias [out] or None, prologue) -> x [T, in], residual -> [T, out].
        add_lora: (a layer of make_linear, its prologue, adapters) -> the layer with the adapters of the rows.
        make_feed_forward: (up, down), whose prologue is the activation -> the network of both.
        call_each: (layers, xs, outs), writes layer(x) [T, out] of small layers that do not depend on each other.
        make_residual_sum: (after, of_sum, multiplier, scale) -> the sum of the residual stream and a branch; the
            prologues are norms or none.
        make_mixture: (mixture) -> x [T, in] -> [T, in]. The next call may overwrite the result.
        make_recurrence: (recurrence) -> the kernel of a recurrence, and the memory of its states.
        new_rows: (x [T, n], purpose, width) -> rows [T, width] without defined values, for results of other kernels.
            The next call with the same purpose and width may return the same memory.
        gate: (x [T, n], logits [T, m], activation) -> x * activation(logits), which may be computed in the memory of x.
            Each logit is that of n / m consecutive values.
        attention: (shape) -> the attention backend of a model.
        notes: lines to log once a model is loaded.
        run_layers: `run_in_order` for layers that only call functions of this set.
    """

    name: str
    load_matrix: Callable[[Weights, MatrixParts, int], Any]
    load_router: Callable[[Weights, MatrixParts, int], Any]
    make_embedding: Callable[[Any], RowKernel]
    make_linear: Callable[[Any, torch.Tensor | None, Prologue], LinearKernel]
    add_lora: Callable[[Any, Prologue, LoraLayer], LinearKernel]
    make_residual_sum: Callable[[Prologue, Prologue, float, float], ResidualSumKernel]
    make_mixture: Callable[[Mixture], MixtureKernel]
    make_recurrence: Callable[[Recurrence], RecurrentKernel]
    gate: Callable[[torch.Tensor, torch.Tensor, GateActivation], torch.Tensor]
    attention: Callable[[AttentionShape], AttentionBackend[Any]]
    make_feed_forward: Callable[[LinearKernel, LinearKernel], FeedForwardKernel] = compose_feed_forward
    call_each: Callable[[Sequence[LinearKernel], Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = call_each
    new_rows: Callable[[torch.Tensor, str, int], torch.Tensor] = _new_rows
    notes: Callable[[], list[str]] = list
    run_layers: Callable[[Sequence[Layer], torch.Tensor, StepContext], torch.Tensor] = run_in_order
