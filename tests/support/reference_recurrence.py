"""The reference implementation of recurrences, which computes each sequence alone and token by token."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F

from chairlift.kernels.recurrence import (
    L2_EPS,
    Convolution,
    GatedDelta,
    Mamba2,
    Recurrence,
    RecurrentState,
    ShortConvolution,
    StateStep,
    allocate_state,
)


class ReferenceRecurrence:
    """A `RecurrentKernel` of plain loops."""

    def __init__(self, recurrence: Recurrence) -> None:
        self._recurrence = recurrence

    def allocate(self, num_slots: int) -> RecurrentState:
        return allocate_state(self._recurrence, num_slots)

    def __call__(self, projected: torch.Tensor, state: RecurrentState, step: StateStep) -> torch.Tensor:
        out = torch.zeros((len(projected), self._recurrence.out_features), device=projected.device)
        for start, stop, source, slot, snapshots in step.spans:
            own = [torch.zeros_like(each[0]) if source < 0 else each[source].clone() for each in _tensors(state)]
            for row in range(start, stop):
                out[row] = compute_token(self._recurrence, projected[row].float(), own)
                targets = [target for count, target in snapshots if count == row + 1 - start]
                for target in [*targets, *([slot] if row + 1 == stop and slot >= 0 else [])]:
                    for kept, value in zip(_tensors(state), own, strict=True):
                        kept[target] = value
        return out.to(projected.dtype)


def compute_token(recurrence: Recurrence, row: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
    """Compute the result of one token [out_features] from its row [in], and replace the values of the state.

    Args:
        state: the convolution [channels, width - 1] and, if the recurrence has one, the matrix [num_heads, K, V] of the
            sequence.
    """
    if isinstance(recurrence, ShortConvolution):
        b, c, x = row.chunk(3)
        return c * _convolve(recurrence.convolution, b * x, state[0])
    return (
        _gated_delta(recurrence, row, *state)
        if isinstance(recurrence, GatedDelta)
        else _mamba2(recurrence, row, *state)
    )


def _gated_delta(rule: GatedDelta, row: torch.Tensor, tail: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    z, b, a, qkv = (parts_of(rule, row)[name] for name in ("z", "b", "a", "qkv"))
    mixed = F.silu(_convolve(rule.convolution, qkv, tail))
    keys = rule.num_key_heads * rule.key_dim
    q, k = (part.view(-1, rule.key_dim) for part in mixed[: 2 * keys].chunk(2))
    v = mixed[2 * keys :].view(-1, rule.value_dim)
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + L2_EPS) for part in (q, k))
    shared = rule.num_heads // rule.num_key_heads
    q, k = (part.repeat(shared, 1) if rule.has_tiled_keys else part.repeat_interleave(shared, dim=0) for part in (q, k))
    g = rule.decay.float() * F.softplus(a + rule.dt_bias.float())
    beta = rule.beta_scale * torch.sigmoid(b)
    matrix *= g.exp().view(rule.num_heads, -1, 1)
    delta = beta[:, None] * (v - (k[..., None] * matrix).sum(1))
    matrix += k[..., None] * delta[:, None]
    o: torch.Tensor = (q[..., None] * matrix).sum(1) * rule.key_dim**-0.5
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + rule.norm_eps) * rule.norm_weight.float()
    return normed.flatten() * (F.silu(z) if rule.gate == "silu" else torch.sigmoid(z))


def parts_of(rule: GatedDelta, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of rows of the gated delta rule."""
    ends = dict(zip(rule.row_parts, accumulate(rule.row_parts.values()), strict=True))
    return {name: rows[..., end - rule.row_parts[name] : end] for name, end in ends.items()}


def _mamba2(rule: Mamba2, row: torch.Tensor, tail: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    if rule.projection_scales is not None:
        row = row * rule.projection_scales
    z, xbc, dt = torch.split(row, list(rule.row_parts))
    mixed = F.silu(_convolve(rule.convolution, xbc, tail))
    x, b, c = torch.split(mixed, list(rule.mixed_parts))
    x = x.view(rule.num_heads, rule.head_dim)
    shared = rule.num_heads // rule.num_groups
    b, c = (part.view(-1, rule.state_size).repeat_interleave(shared, dim=0) for part in (b, c))
    t = F.softplus(dt + rule.dt_bias.float()).clamp(*rule.dt_limits)
    matrix *= (rule.decay.float() * t).exp()[:, None, None]
    matrix += b[..., None] * (t[:, None] * x)[:, None]
    y = ((c[..., None] * matrix).sum(1) + rule.skip.float()[:, None] * x).flatten()
    if rule.norm_weight is None:
        return y * F.silu(z)
    if not rule.norm_before_gate:
        y = y * F.silu(z)
    groups = y.view(-1, rule.norm_group_size)
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + rule.norm_eps)).flatten()
    normed = normed * rule.norm_weight.float()
    return normed * F.silu(z) if rule.norm_before_gate else normed


def _convolve(convolution: Convolution, x: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Convolve the inputs of one token [channels] and those in `tail`, to which they are appended."""
    window = torch.cat((tail, x[:, None]), dim=1)
    tail.copy_(window[:, 1:])
    y: torch.Tensor = (window * convolution.weight.float()).sum(1)
    return y if convolution.bias is None else y + convolution.bias.float()


def _tensors(state: RecurrentState) -> list[torch.Tensor]:
    return [each for each in state if each is not None]
