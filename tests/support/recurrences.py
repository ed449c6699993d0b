"""Random recurrences and steps, for tests of their kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chairlift.kernels.recurrence import (
    Convolution,
    GatedDelta,
    Mamba2,
    Recurrence,
    RecurrentKernel,
    RecurrentState,
    ShortConvolution,
    StateStep,
)

KINDS = (
    "short_convolution",
    "gated_delta",
    "tiled_keys",
    "channel_decay",
    "mamba2",
    "norm_before_gate",
    "mamba2_without_norm",
)


def random_recurrence(kind: str, seed: int = 0) -> tuple[Recurrence, int]:
    """A recurrence with odd sizes, and the width of its rows."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    if kind == "short_convolution":
        return ShortConvolution(Convolution(normal(13, 3), normal(13))), 39
    if kind in ("gated_delta", "tiled_keys", "channel_decay"):
        keys, heads, key_dim, value_dim = 2, 4, 12, 7
        by_channel = kind == "channel_decay"
        decays = heads * key_dim if by_channel else heads
        rule = GatedDelta(
            convolution=Convolution(normal(2 * keys * key_dim + heads * value_dim, 4)),
            num_key_heads=keys,
            num_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            decay=-normal(decays).exp(),
            dt_bias=normal(decays),
            norm_weight=normal(value_dim),
            norm_eps=1e-6,
            beta_scale=2.0 if kind == "tiled_keys" else 1.0,
            has_tiled_keys=kind == "tiled_keys",
            has_channel_decay=by_channel,
            gate="sigmoid" if by_channel else "silu",
        )
        return rule, sum(rule.row_parts.values()) + 5 * by_channel
    heads, head_dim, groups, size = 6, 5, 2, 9
    inner = heads * head_dim
    has_norm, width = kind != "mamba2_without_norm", 2 * inner + 2 * groups * size + heads
    mamba = Mamba2(
        convolution=Convolution(normal(inner + 2 * groups * size, 4), normal(inner + 2 * groups * size)),
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=size,
        decay=-normal(heads).exp(),
        dt_bias=normal(heads),
        skip=normal(heads),
        norm_weight=normal(inner) if has_norm else None,
        norm_eps=1e-5,
        norm_before_gate=kind == "norm_before_gate",
        dt_limits=(0.05, 3.0),
        projection_scales=None if has_norm else normal(width),
    )
    return mamba, width


def state_step(
    lengths: Sequence[int], sources: Sequence[int], slots: Sequence[int], snapshots: Sequence[tuple[int, int, int]] = ()
) -> StateStep:
    """A step of sequences with so many tokens."""
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    numbers = (torch.tensor(each, dtype=torch.int32) for each in (sources, slots, list(snapshots)))
    read, written, kept = numbers
    return StateStep(starts, read, written, kept.view(-1, 3))


def compute_alone(kernel: RecurrentKernel, rows: torch.Tensor) -> tuple[torch.Tensor, list[RecurrentState]]:
    """The results of a sequence that is computed token by token, and the state after each token."""
    state, results, states = kernel.allocate(1), [], []
    for index, row in enumerate(rows):
        step = state_step([1], [0 if index else -1], [0])
        results.append(kernel(row[None].clone(), state, step)[0].clone())
        states.append(RecurrentState(*(None if each is None else each.clone() for each in state)))
    return torch.stack(results), states


def slot_values(state: RecurrentState, slot: int) -> torch.Tensor:
    """All values of a slot, in one row."""
    return torch.cat([each[slot].flatten() for each in state if each is not None])
