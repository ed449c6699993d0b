"""The interface of sampling: one token per row from the logits of a batch, and logprobs of given tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

Bits = npt.NDArray[np.uint32]
"""One bit per token of the vocabulary, the lowest bit of a word first; 1 allows the token."""

TokenSampler = Callable[[torch.Tensor, IntArray], torch.Tensor]
"""(logits float32 [N, V], contiguous, overwritten; rows int64 [N]) -> token ids int64 [N], on the logits' device.

A row of `SamplingParameters` that is not random yields the likeliest token, the first one in a tie. Any other row
yields a draw with probabilities proportional to exp(logit / temperature), over the tokens that pass the filters min_p,
top_k and top_p, in this order."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """The sampling parameters of each row, as arrays. Their owner may change them between calls of a sampler.

    Attributes:
        is_random: uint8, 0 for the likeliest token.
        temperature: float32, positive.
        top_k: int64, less than the vocabulary, 0 keeps all.
        top_p: float64 in (0, 1], 1 keeps all.
        min_p: float32 in [0, 1], 0 keeps all.
        keys: uint64, the random stream of the row.
        positions: int64, the position of the sampled token in its sequence; with the key it determines the draw.
    """

    is_random: npt.NDArray[np.uint8]
    temperature: npt.NDArray[np.float32]
    top_k: IntArray
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    keys: npt.NDArray[np.uint64]
    positions: IntArray


class SamplingKernels(Protocol):
    """The sampling functions of a kernel set."""

    def make_sampler(self, parameters: SamplingParameters) -> TokenSampler:
        """A sampler that reads these parameters at every call."""
        ...

    def mask(self, logits: torch.Tensor, index: IntArray, masks: Bits) -> None:
        """Set the logits of row index[i] whose bit in masks[i] is 0 to -inf.

        Args:
            logits: float32 [N, V], contiguous, overwritten.
            index: int64 [M].
            masks: uint32 [M, ceil(V / 32)], contiguous, the lowest bit of a word first.
        """
        ...

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The log_softmax of the logits, at one given token per row and at the likeliest tokens.

        Args:
            logits: float32 [N, V], contiguous.
            token_ids: int64 [N], the given tokens.
            num_top: the number of likeliest tokens; at most V are returned, K = min(num_top, V).

        Returns:
            Token ids int64, logprobs float32 and ranks int64, [N, 1 + K] each: the given token, then the likeliest
            tokens in order. A rank is 1 + the number of likelier tokens, so ties share a rank.
        """
        ...


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, log_sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `SamplingKernels.logprobs` from the logsumexp of the logits, float32 [N, 1]."""
    chosen = logits.gather(1, token_ids[:, None])
    chosen_ranks = 1 + (logits > chosen).sum(dim=1, keepdim=True)
    top = logits.topk(min(num_top, logits.shape[1]), dim=1)
    top_ranks = 1 + (top.values[:, None, :] > top.values[:, :, None]).sum(dim=2)
    return (
        torch.cat((token_ids[:, None], top.indices), dim=1),
        torch.cat((chosen, top.values), dim=1) - log_sums,
        torch.cat((chosen_ranks, top_ranks), dim=1),
    )
