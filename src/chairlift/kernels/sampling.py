"""The seam of sampling: logits of a batch to one token a row, and logprobs of chosen tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

Bits = npt.NDArray[np.uint32]
"""One bit a token of the vocabulary, the lowest bit of a word first; 1 allows the token."""

TokenSampler = Callable[[torch.Tensor, IntArray], torch.Tensor]
"""(logits float32 [N, V], contiguous, overwritten; rows int64 [N]) -> token ids int64 [N], on the logits' device.

A row of `SamplingParameters` that is not random gives the likeliest token, the first of equals; every other one a draw
from exp(logit / temperature) over the tokens that min_p, top_k and top_p leave, in this order."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How each row is sampled from, as arrays that their owner goes on writing to.

    Attributes:
        is_random: uint8, 0 for argmax.
        temperature: float32, positive.
        top_k: int64, less than the vocabulary, 0 keeps all.
        top_p: float64 in (0, 1], 1 keeps all.
        min_p: float32 in [0, 1], 0 keeps all.
        keys: uint64, of the row's random stream.
        positions: int64, of the token to be drawn in its sequence; with the key it determines the draw.
    """

    is_random: npt.NDArray[np.uint8]
    temperature: npt.NDArray[np.float32]
    top_k: IntArray
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    keys: npt.NDArray[np.uint64]
    positions: IntArray


class SamplingKernels(Protocol):
    """One way to sample."""

    def make_sampler(self, parameters: SamplingParameters) -> TokenSampler:
        """A sampler over these rows."""
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
        """log_softmax of the logits, at the tokens asked for and at the likeliest ones.

        Args:
            logits: float32 [N, V], contiguous.
            token_ids: int64 [N].
            num_top: likeliest tokens wanted; K = min(num_top, V) are given.

        Returns:
            Token ids int64, logprobs float32 and ranks int64, [N, 1 + K] each: the token asked for, then the likeliest
            in order. A rank is 1 + the number of likelier tokens, so equals share one.
        """
        ...
