"""GroupedMixture: a mixture of experts from the other kernels of a set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from chairlift.kernels import reference
from chairlift.kernels.interface import NO_PROLOGUE, LinearKernel, Mixture, Prologue, RowKernel
from chairlift.kernels.routing import ExpertRouting

MakeLinear = Callable[..., LinearKernel]
"""`Kernels.make_linear`."""


class GroupedMixture:
    """A mixture of experts that groups the rows by expert, and computes each expert once for all of its rows.

    Experts are added in ascending order.

    Args:
        norm: None leaves rows as they are.
        router: the logits of normed rows; of rows as they are with `has_router_norm`.
        experts: the up and down projection of each expert.
        expert_scales, selection_bias: see Mixture.
    """

    def __init__(
        self,
        norm: RowKernel | None,
        router: LinearKernel,
        experts: Sequence[tuple[LinearKernel, LinearKernel]],
        routing: ExpertRouting,
        expert_scales: torch.Tensor | None = None,
        selection_bias: torch.Tensor | None = None,
        *,
        has_router_norm: bool = False,
    ) -> None:
        self._norm = norm
        self._router = router
        self._experts = experts
        self._routing = routing
        self._expert_scales = expert_scales
        self._selection_bias = selection_bias
        self._has_router_norm = has_router_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = x if self._norm is None else self._norm(x)
        logits = self._router(x if self._has_router_norm else normed)
        chosen, weights = reference.route(logits, self._routing, self._expert_scales, self._selection_bias)
        x = normed
        out = torch.zeros_like(x)
        for expert in sorted({expert for row in chosen.tolist() for expert in row}):
            up, down = self._experts[expert]
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            y = down(up(x[rows])) * weights[rows, places, None]
            out.index_add_(0, rows, y.to(x.dtype))
        return out


def group_mixture(
    mixture: Mixture, make_linear: MakeLinear, make_prologue: Callable[[Prologue], RowKernel]
) -> GroupedMixture:
    """Return a `GroupedMixture` of the kernels that `make_linear` and `make_prologue` return."""
    router, activation = mixture.router, Prologue(mixture.activation)
    return GroupedMixture(
        None if mixture.norm.kind == "none" else make_prologue(mixture.norm),
        make_linear(router.matrix, router.bias, mixture.router_norm or NO_PROLOGUE),
        [
            (make_linear(up.matrix, up.bias, NO_PROLOGUE), make_linear(down.matrix, down.bias, activation))
            for up, down in mixture.experts
        ],
        mixture.routing,
        mixture.expert_scales,
        mixture.selection_bias,
        has_router_norm=mixture.router_norm is not None,
    )
