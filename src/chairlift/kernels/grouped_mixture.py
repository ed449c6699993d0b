"""GroupedMixture: a mixture of experts from the other kernels of a set; `route` chooses the experts of each row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from chairlift.kernels.activations import sigmoid
from chairlift.kernels.interface import NO_PROLOGUE, LinearKernel, Mixture, Prologue, RowKernel
from chairlift.kernels.routing import ExpertRouting

MakeLinear = Callable[..., LinearKernel]
"""`Kernels.make_linear`."""


def route(
    logits: torch.Tensor,
    routing: ExpertRouting,
    expert_scales: torch.Tensor | None = None,
    selection_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each row from the logits of the router, [T, num_experts].

    Args:
        expert_scales, selection_bias: see Mixture.

    Returns:
        The experts of each row, int64 [T, experts_per_token], and their weights, float32 of the same shape.
    """
    scores = sigmoid(logits.float()) if routing.has_sigmoid else logits.float()
    # A bias is added to the scores. Without it the choice by logits is the same, and equal logits alone are equal.
    has_scores = routing.has_sigmoid or selection_bias is not None
    if has_scores and not routing.has_sigmoid:
        scores = scores.softmax(-1)
    biased = scores if selection_bias is None else scores + selection_bias.float()
    if routing.groups_per_token < routing.num_groups:
        grouped = biased.view(len(biased), routing.num_groups, -1)
        best = grouped.sort(dim=-1, descending=True).values[..., : 2 if routing.has_sigmoid else 1].sum(-1)
        closed = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, routing.groups_per_token :]
        biased = grouped.scatter(1, closed[..., None].expand(-1, -1, grouped.shape[2]), -torch.inf).flatten(1)
    chosen = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, : routing.experts_per_token]
    weights = scores.gather(1, chosen)
    if has_scores and routing.softmax == "chosen":
        weights = weights / (weights.sum(-1, keepdim=True) + routing.sum_eps).clamp(min=routing.sum_min)
    elif not has_scores:
        weights = weights.softmax(-1) if routing.softmax == "chosen" else scores.softmax(-1).gather(1, chosen)
    weights = weights * routing.scale
    return chosen, weights if expert_scales is None else weights * expert_scales.float()[chosen]


class GroupedMixture:
    """A mixture of experts that groups the rows by expert, and computes each expert once for all of its rows.

    Experts are added in ascending order.

    Args:
        make_linear, make_prologue: return the kernels of which it consists.
    """

    def __init__(
        self, mixture: Mixture, make_linear: MakeLinear, make_prologue: Callable[[Prologue], RowKernel]
    ) -> None:
        router, activation = mixture.router, Prologue(mixture.activation)
        self._norm = make_prologue(mixture.norm)
        self._router = make_linear(router.matrix, router.bias, mixture.router_norm or NO_PROLOGUE)
        self._has_router_norm = mixture.router_norm is not None
        self._experts = [
            (make_linear(up.matrix, up.bias, NO_PROLOGUE), make_linear(down.matrix, down.bias, activation))
            for up, down in mixture.experts
        ]
        self._routing, self._expert_scales = mixture.routing, mixture.expert_scales
        self._selection_bias = mixture.selection_bias

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        normed = self._norm(x)
        routed = x if routed is None else routed
        logits = self._router(routed if self._has_router_norm else normed)
        chosen, weights = route(logits, self._routing, self._expert_scales, self._selection_bias)
        out = torch.zeros_like(normed)
        for expert in sorted({expert for row in chosen.tolist() for expert in row}):
            up, down = self._experts[expert]
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            y = down(up(normed[rows])) * weights[rows, places, None]
            out.index_add_(0, rows, y.to(out.dtype))
        return out
