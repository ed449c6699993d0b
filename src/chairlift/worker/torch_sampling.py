"""Sampling in torch on every device: the same functions as the native kernels, each over a whole batch.

Each filter (min_p, top_k, top_p) is one threshold for each row: tokens with a smaller weight are dropped. A threshold
does not depend on the order of tokens with equal weight, so these are kept or dropped together, except that top_p keeps
only as many as it needs. The result of a row does not depend on the other rows of the batch. All functions change their
input in place.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from chairlift.kernels.device_copy import to_device
from chairlift.kernels.sampling import Bits, IntArray, SamplingParameters, TokenSampler, top_logprobs
from chairlift.worker.random_stream import uniform

NUCLEUS_HEAD_SIZES = (128, 2048)
"""Numbers of the most likely tokens that are sorted for top_p before the whole vocabulary is."""

_CDF_GROUP = 256


class TorchSampling:
    """The torch implementation of `SamplingKernels`."""

    def make_sampler(self, parameters: SamplingParameters) -> TokenSampler:
        return TorchSampler(parameters)

    def mask(self, logits: torch.Tensor, index: IntArray, masks: Bits) -> None:
        device, vocab_size = logits.device, logits.shape[1]
        words = to_device(masks.view(np.int32), device)
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
        batch_index = to_device(index, device)
        logits[batch_index] = logits[batch_index].masked_fill_(
            bits.view(len(index), -1)[:, :vocab_size] == 0, -torch.inf
        )

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return top_logprobs(logits, token_ids, num_top, logits.logsumexp(dim=1, keepdim=True))


class TorchSampler:
    """The torch implementation of `TokenSampler`. Steps that no row of the batch needs are skipped."""

    def __init__(self, parameters: SamplingParameters) -> None:
        self._parameters = parameters

    def __call__(self, logits: torch.Tensor, rows: IntArray) -> torch.Tensor:
        random = np.flatnonzero(self._parameters.is_random[rows])
        if not len(random):
            return logits.argmax(dim=1)
        if len(random) == len(rows):
            return self._draw(logits, rows)
        token_ids = logits.argmax(dim=1)
        index = to_device(random, logits.device)
        token_ids[index] = self._draw(logits[index], rows[random])
        return token_ids

    def _draw(self, logits: torch.Tensor, rows: IntArray) -> torch.Tensor:
        parameters, device = self._parameters, logits.device
        weights = weights_(logits, to_device(parameters.temperature[rows], device))
        top_k, top_p, min_p = parameters.top_k[rows], parameters.top_p[rows], parameters.min_p[rows]
        filtered = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
        if len(filtered):
            index = None if len(filtered) == len(rows) else to_device(filtered, device)
            part = weights if index is None else weights[index]
            top_k, top_p, min_p = top_k[filtered], top_p[filtered], min_p[filtered]
            limits = (to_device(each, device) for each in (top_k, top_p, min_p))
            filter_(part, *limits, max_top_k=int(top_k.max()), any_top_p=bool((top_p < 1).any()))
            if index is not None:
                weights[index] = part
        uniforms = uniform(parameters.keys[rows], parameters.positions[rows])
        return draw(weights, to_device(uniforms, device))


def apply_penalties(
    logits: torch.Tensor,
    batch_index: torch.Tensor,
    token_ids: torch.Tensor,
    is_output: torch.Tensor,
    penalties: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Apply repetition, frequency and presence penalties to the tokens that have occurred.

    Args:
        logits: float32 [N, V], contiguous.
        batch_index: int64 [P, 1], the rows of `logits` with a penalty.
        token_ids: int64 [P, L], the tokens that occurred, any number of times.
        is_output: float32 [P, L], 1 for output tokens and 0 for prompt tokens.
        penalties: float32 [3, P, 1]: repetition, presence, frequency.
        counts: float32, at least N * V zeros, which are zero again on return.
    """
    index = batch_index * logits.shape[1] + token_ids
    counts.scatter_add_(0, index.view(-1), is_output.reshape(-1))
    occurrences = counts[index]
    counts[index] = 0.0
    repetition, presence, frequency = penalties
    flat = logits.view(-1)
    values = flat[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    # A token that has occurred several times is written several times with the same value.
    flat[index] = values - frequency * occurrences - presence * (occurrences > 0)


def weights_(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Compute exp((logit - maximum) / temperature), the unnormalised probabilities.

    The maximum is subtracted before the division, so a tiny temperature cannot overflow.

    Args:
        logits: float32 [N, V], overwritten.
        temperature: float32 [N].
    """
    return logits.sub_(logits.amax(dim=1, keepdim=True)).div_(temperature[:, None]).exp_()


def filter_(
    weights: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    max_top_k: int,
    any_top_p: bool,
) -> torch.Tensor:
    """Set the weights of dropped tokens to 0: first min_p, then top_k, then top_p over the remaining tokens.

    Args:
        weights: float32 [N, V], the result of `weights_`.
        top_k: int64 [N], 0 keeps all.
        top_p: float64 [N], 1 keeps all.
        min_p: float32 [N], 0 keeps all.
        max_top_k: the maximum of `top_k`; any_top_p: a value of `top_p` is below 1. Both are known on the host.
    """
    floor = min_p.clone()
    if max_top_k:
        head = weights.topk(max_top_k, dim=1).values
        kth = head.gather(1, (top_k - 1).clamp_(min=0)[:, None]).squeeze(1)
        floor = torch.where(top_k > 0, torch.maximum(floor, kth), floor)
    weights.masked_fill_(weights < floor[:, None], 0.0)
    if any_top_p:
        target = torch.where(top_p < 1, top_p * weights.sum(dim=1, dtype=torch.float64), 0.0)
        floor = _nucleus_floor(weights, top_p, target)
        weights.masked_fill_(weights < floor[:, None], 0.0)
        _drop_extra_ties(weights, floor, target)
    return weights


def _drop_extra_ties(weights: torch.Tensor, floor: torch.Tensor, target: torch.Tensor) -> None:
    """Set the weights of the last of the tokens with the weight `floor` to 0 that are not needed to reach `target`. A
    share that is a whole number of tokens is not raised by its rounding."""
    ties = weights == floor[:, None]
    above = weights.masked_fill(ties, 0.0).sum(dim=1, dtype=torch.float64)
    needed = ((target - above) / floor * (1 - 1e-9)).ceil_().clamp_(min=1)
    extra = ties & (ties.cumsum(dim=1) > needed[:, None]) & (target > 0)[:, None]
    weights.masked_fill_(extra, 0.0)


def _nucleus_floor(weights: torch.Tensor, top_p: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The smallest weight in the smallest set of tokens with the weight `target`, a share of `top_p`; float32 [N].

    On the CPU only the most likely tokens are sorted, and more of them for rows that need more. A device would have to
    wait for the host after each attempt, so it sorts the whole vocabulary at once.
    """
    vocab_size = weights.shape[1]
    heads = NUCLEUS_HEAD_SIZES if weights.device.type == "cpu" else ()
    sizes = [*(size for size in heads if size < vocab_size), vocab_size]
    floor = torch.zeros_like(weights[:, 0])
    pending: torch.Tensor | slice = slice(None)
    for size in sizes:
        head = weights[pending].topk(size, dim=1).values
        mass = head.cumsum(dim=1, dtype=torch.float64)
        inside = (mass - head) < target[pending][:, None]
        floor[pending] = head.gather(1, inside.sum(dim=1, keepdim=True).sub_(1).clamp_(min=0)).squeeze(1)
        if size == vocab_size:
            break
        pending = torch.arange(len(weights))[pending][mass[:, -1] < target[pending]]
        if not len(pending):
            break
    return floor.masked_fill_(top_p >= 1, 0.0)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw by inverse transform sampling: the first token id at which the cumulative sum exceeds uniform * total.

    It needs one random number for each row, and never draws tokens of weight 0. The sum is computed over groups of
    tokens and then within one group, so that only a fraction of the vocabulary is converted to float64.

    Args:
        weights: float32 [N, V], not negative, with at least one positive weight in each row.
        uniforms: float64 [N], in [0, 1).

    Returns:
        int64 [N].
    """
    num_rows, vocab_size = weights.shape
    group = min(_CDF_GROUP, vocab_size)
    padded = functional.pad(weights, (0, -vocab_size % group)) if vocab_size % group else weights
    grouped = padded.view(num_rows, -1, group)
    mass = grouped.sum(dim=2, dtype=torch.float64).cumsum_(dim=1)
    target = uniforms[:, None] * mass[:, -1:]
    chosen = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[1] - 1)
    before = torch.where(chosen > 0, mass.gather(1, (chosen - 1).clamp_(min=0)), 0.0)
    inner = grouped[torch.arange(num_rows, device=weights.device), chosen.squeeze(1)].double().cumsum_(dim=1)
    # The two sums of a group may differ in the last bit, so the target is limited to the inner sum.
    rest = torch.minimum(target - before, inner[:, -1:] * (1 - 2.0**-52))
    return (chosen * group + torch.searchsorted(inner, rest, right=True)).squeeze(1).clamp_(max=vocab_size - 1)
