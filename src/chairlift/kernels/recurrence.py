"""The interface of layers with recurrent state: their parameters, the state of sequences, and the kernel of a set.

A recurrence stands between the input and the output projection of a layer. It consists of a causal convolution of each
channel over the last `width` tokens and, except in `ShortConvolution`, of a state [K, V] for each head:

    S = exp(g) * S + k (x) d        o = q . S        (x) is the outer product

with d = v in Mamba-2 (Dao and Gu, 2024), and d = beta * (v - k . (exp(g) * S)) in the gated delta rule (Yang et al.,
2024), where g may differ between the channels of k (Kimi Delta Attention; Kimi Team, 2025). Tokens are computed one
after the other, in prompts too, so the state after a token has the same bits in any batch and any division of the
sequence into steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from chairlift.kernels.recurrence_sizes import GatedDeltaSizes, Mamba2Sizes

L2_EPS = 1e-6
"""Is added to the sum of squares of the q and k of a head in `GatedDelta`."""


class SequenceSpan(NamedTuple):
    """The rows of a sequence in a step, `start` to `stop`, and its slots; see StateStep.

    Attributes:
        snapshots: (number of tokens, slot), ascending.
    """

    start: int
    stop: int
    source: int
    slot: int
    snapshots: list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class StateStep:
    """The states that the sequences of one step read and write: B sequences, packed as in `AttentionMetadata`.

    A slot that one sequence writes is neither read nor written by another sequence of the step.

    Attributes:
        query_start_loc: int32 [B + 1], ascending from 0.
        sources: int32 [B], the slot with the state before the first token of each sequence; -1 for the zero state.
        slots: int32 [B], the slot that receives the state after the last token; -1 writes nothing.
        snapshots: int32 [M, 3], (sequence, number of its tokens in this step, slot): the state after so many tokens is
            written to the slot as well. Ascending by sequence and number.
    """

    query_start_loc: torch.Tensor
    sources: torch.Tensor
    slots: torch.Tensor
    snapshots: torch.Tensor

    @cached_property
    def spans(self) -> list[SequenceSpan]:
        """The sequences as numbers, which are copied from the device on first use."""
        starts = self.query_start_loc.tolist()
        pairs = zip(starts[:-1], starts[1:], self.sources.tolist(), self.slots.tolist(), strict=True)
        spans = [SequenceSpan(*pair, []) for pair in pairs]
        for sequence, count, slot in self.snapshots.tolist():
            spans[sequence].snapshots.append((count, slot))
        return spans


class RecurrentState(NamedTuple):
    """The states of one layer, float32, zeroed when allocated.

    Attributes:
        convolution: [num_slots, channels, width - 1], the last inputs of the convolution, oldest first.
        matrix: [num_slots, num_heads, K, V]; None in a `ShortConvolution`.
    """

    convolution: torch.Tensor
    matrix: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """A causal convolution of each channel: y[t] = bias + sum over i < width of weight[i] * x[t - width + 1 + i].

    Attributes:
        weight: [channels, width].
        bias: [channels] or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def num_channels(self) -> int:
        return len(self.weight)

    @property
    def width(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvolution:
    """c * convolution(b * x) of rows [b | c | x] (LFM2): [T, 3 * channels] -> [T, channels]."""

    convolution: Convolution

    @property
    def out_features(self) -> int:
        return self.convolution.num_channels

    @property
    def matrix_shape(self) -> None:
        return None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GatedDelta(GatedDeltaSizes):
    """The gated delta rule of rows [q | k | v | z | b | a], or [a | z | q | k | v | b | unread values] with
    `has_channel_decay`: [T, in] -> [T, num_heads * value_dim].

    q, k and v pass through the convolution and SiLU. Then q and k are divided by the square root of their sum of
    squares plus L2_EPS in each head, and q is multiplied by key_dim**-0.5. Head h reads q and k of head
    h // (num_heads / num_key_heads), or with `has_tiled_keys` of head h % num_key_heads. With beta = beta_scale *
    sigmoid(b) and g = decay * softplus(a + dt_bias), the result is rms_norm(o) * gate(z), where each head is normed by
    the same weights.

    Attributes:
        decay: [num_decays], -exp(A_log).
        dt_bias: [num_decays].
        norm_weight: [value_dim].
    """

    convolution: Convolution
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Mamba2(Mamba2Sizes):
    """Mamba-2 of rows [z | x | B | C | dt]: [T, in] -> [T, num_heads * head_dim].

    x, B and C pass through the convolution and SiLU. `num_heads / num_groups` consecutive heads share B and C. With t =
    clamp(softplus(dt + dt_bias)), g = decay * t, k = B, q = C and v = t * x, a head computes y = o + skip * x. The
    result is norm(y * silu(z)), norm(y) * silu(z) if `norm_before_gate`, or y * silu(z) without a norm. The values of
    the heads of a group are normed together.

    Attributes:
        decay: [num_heads], -exp(A_log).
        dt_bias, skip: [num_heads].
        norm_weight: [num_heads * head_dim], or None without a norm.
        projection_scales: [in], the factors of a row, or None.
    """

    convolution: Convolution
    decay: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor
    norm_weight: torch.Tensor | None = None
    norm_eps: float = 0.0
    projection_scales: torch.Tensor | None = None


Recurrence = ShortConvolution | GatedDelta | Mamba2


class RecurrentKernel(Protocol):
    """A recurrence with its parameters, and the memory of its states."""

    def allocate(self, num_slots: int) -> RecurrentState:
        """Allocate the states of the layer."""
        ...

    def __call__(self, projected: torch.Tensor, state: RecurrentState, step: StateStep) -> torch.Tensor:
        """Compute the recurrence of the sequences of a step, and write their states.

        Args:
            projected: [T, in], which may be overwritten. Rows after the last sequence have an undefined result.

        Returns:
            [T, out_features], valid until the next call of a kernel of the same kind and sizes.
        """
        ...


def allocate_state(recurrence: Recurrence, num_slots: int) -> RecurrentState:
    """Return zeroed states on the device of the parameters."""
    convolution, shape = recurrence.convolution, recurrence.matrix_shape
    device = convolution.weight.device
    tails = torch.zeros((num_slots, convolution.num_channels, convolution.width - 1), device=device)
    return RecurrentState(tails, None if shape is None else torch.zeros((num_slots, *shape), device=device))
