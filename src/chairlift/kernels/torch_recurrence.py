"""Recurrences in torch, on every device: the tokens one after the other, and all sequences and heads at a time.

A sum has a fixed tree of additions, and other functions are exact or torch.exp and torch.log1p, because most other
functions of torch give another last bit at the end of a tensor than in its middle.
"""

from __future__ import annotations

import torch

from chairlift.kernels.activations import sigmoid, softplus
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


class TorchRecurrence:
    """A `RecurrentKernel` with loops over tokens, but not over sequences and heads."""

    def __init__(self, recurrence: Recurrence) -> None:
        self._recurrence = recurrence

    def allocate(self, num_slots: int) -> RecurrentState:
        return allocate_state(self._recurrence, num_slots)

    def __call__(self, projected: torch.Tensor, state: RecurrentState, step: StateStep) -> torch.Tensor:
        num_rows = step.spans[-1].stop
        out = projected.new_zeros((len(projected), self._recurrence.out_features))
        out[:num_rows] = _compute(self._recurrence, projected[:num_rows].float(), state, step)
        return out


def _compute(rule: Recurrence, rows: torch.Tensor, state: RecurrentState, step: StateStep) -> torch.Tensor:
    if isinstance(rule, ShortConvolution):
        b, c, x = rows.chunk(3, dim=1)
        return c * _convolve(rule.convolution, b * x, state.convolution, step)
    if isinstance(rule, GatedDelta):
        return _gated_delta(rule, rows, state, step)
    return _mamba2(rule, rows, state, step)


def _gated_delta(rule: GatedDelta, rows: torch.Tensor, state: RecurrentState, step: StateStep) -> torch.Tensor:
    assert state.matrix is not None
    widths = rule.row_parts
    split = torch.split(rows[:, : sum(widths.values())], list(widths.values()), dim=1)
    parts = dict(zip(widths, split, strict=True))
    mixed = _silu(_convolve(rule.convolution, parts["qkv"], state.convolution, step))
    keys = rule.num_key_heads * rule.key_dim
    q, k = (part.reshape(len(rows), -1, rule.key_dim) for part in mixed[:, : 2 * keys].chunk(2, dim=1))
    v = mixed[:, 2 * keys :].reshape(len(rows), -1, rule.value_dim)
    q, k = (part * torch.rsqrt(_tree_sum(part * part, -1) + L2_EPS) for part in (q, k))
    g = rule.decay.float() * softplus(parts["a"] + rule.dt_bias.float())
    beta = rule.beta_scale * sigmoid(parts["b"])
    o = _scan(torch.exp(g), q * rule.key_dim**-0.5, k, v, beta, state.matrix, step, rule.has_tiled_keys)
    gate = _silu if rule.gate == "silu" else sigmoid
    return _rms_norm(o, rule.norm_weight, rule.norm_eps).flatten(1) * gate(parts["z"])


def _mamba2(rule: Mamba2, rows: torch.Tensor, state: RecurrentState, step: StateStep) -> torch.Tensor:
    assert state.matrix is not None
    if rule.projection_scales is not None:
        rows = rows * rule.projection_scales
    z, xbc, dt = torch.split(rows, list(rule.row_parts), dim=1)
    mixed = _silu(_convolve(rule.convolution, xbc, state.convolution, step))
    x, b, c = torch.split(mixed, list(rule.mixed_parts), dim=1)
    x = x.reshape(len(rows), rule.num_heads, rule.head_dim)
    b, c = (part.reshape(len(rows), -1, rule.state_size) for part in (b, c))
    t = softplus(dt + rule.dt_bias.float()).clamp(*rule.dt_limits)
    o = _scan(torch.exp(rule.decay.float() * t), c, b, t[..., None] * x, None, state.matrix, step)
    y = (o + rule.skip.float()[:, None] * x).flatten(1)
    if rule.norm_weight is None:
        return y * _silu(z)
    gated = y if rule.norm_before_gate else y * _silu(z)
    groups = gated.view(len(rows), -1, rule.norm_group_size)
    normed = _rms_norm(groups, rule.norm_weight.view(-1, rule.norm_group_size), rule.norm_eps).flatten(1)
    return normed * _silu(z) if rule.norm_before_gate else normed


def _convolve(convolution: Convolution, x: torch.Tensor, tails: torch.Tensor, step: StateStep) -> torch.Tensor:
    """Convolve the inputs [T, channels], and write the last inputs of each sequence to `tails`.

    The inputs are copied to rows in which each sequence begins with its earlier inputs.
    """
    kept, device = convolution.width - 1, x.device
    sequences = torch.arange(len(step.spans), device=device)
    starts = step.query_start_loc.to(device).long()
    rows = torch.arange(len(x), device=device) + kept * (1 + sequences.repeat_interleave(starts.diff()))
    firsts = starts[:-1] + kept * sequences
    window = torch.arange(kept, device=device)
    inputs = x.new_empty((len(x) + kept * len(step.spans), x.shape[1]))
    inputs[rows] = x
    inputs[firsts[:, None] + window] = _read(tails, step).transpose(1, 2)
    weight = convolution.weight.float()
    y = sum((inputs[rows - kept + i] * weight[:, i] for i in range(1, kept + 1)), inputs[rows - kept] * weight[:, 0])
    for sequence, span in enumerate(step.spans):
        for count, slot in (*span.snapshots, (span.stop - span.start, span.slot)):
            if slot >= 0:
                tails[slot] = inputs[firsts[sequence] + count + window].t()
    return y if convolution.bias is None else y + convolution.bias.float()


def _scan(
    decay: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor | None,
    matrix: torch.Tensor,
    step: StateStep,
    is_tiled: bool = False,
) -> torch.Tensor:
    """Compute the outputs [T, heads, V] of a recurrence with the states `matrix` [num_slots, heads, K, V].

    Args:
        decay: [T, heads] or [T, heads * K], exp(g).
        query, key: [T, groups, K], each for heads / groups consecutive heads, or for every groups-th if `is_tiled`.
        value: [T, heads, V].
        beta: [T, heads] of the delta rule; None adds the values as they are.
    """
    order = sorted(range(len(step.spans)), key=lambda i: step.spans[i].start - step.spans[i].stop)
    spans = [step.spans[i] for i in order]
    grouped = (key.shape[1], value.shape[1] // key.shape[1])[:: -1 if is_tiled else 1]
    q, k = (part[..., None].unsqueeze(1 if is_tiled else 2) for part in (query, key))
    v, factors = value.reshape(-1, *grouped, 1, value.shape[2]), decay.reshape(len(decay), *grouped, -1, 1)
    betas = None if beta is None else beta.reshape(-1, *grouped, 1, 1)
    states = _read(matrix, step)[order].view(-1, *grouped, *matrix.shape[2:])
    out = torch.empty_like(value)
    for token in range(spans[0].stop - spans[0].start):
        active = [span for span in spans if span.stop - span.start > token]
        rows = torch.tensor([span.start + token for span in active], device=value.device)
        own = states[: len(active)].mul_(factors[rows])
        delta = v[rows] if betas is None else betas[rows] * (v[rows] - _tree_sum(k[rows] * own, -2))
        own.add_(k[rows] * delta)
        out[rows] = _tree_sum(q[rows] * own, -2).view(len(active), *value.shape[1:])
        for state, span in zip(own, active, strict=True):
            ends = [(span.stop - span.start, span.slot), *span.snapshots]
            for slot in (slot for count, slot in ends if count == token + 1 and slot >= 0):
                matrix[slot] = state.flatten(0, 1)
    return out


def _read(memory: torch.Tensor, step: StateStep) -> torch.Tensor:
    """Copies of the states before the step, [B, ...]."""
    sources = step.sources.to(memory.device).long()
    states = memory[sources.clamp(min=0)]
    states[sources < 0] = 0
    return states


def _tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over a dimension, which remains with size 1: the first half is added to the second one, and so on."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        pairs = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = pairs if size % 2 == 0 else torch.cat((pairs, x.narrow(dim, size - 1, 1)), dim)
    return x


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(_tree_sum(x * x, -1) / x.shape[-1] + eps) * weight.float()


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)
