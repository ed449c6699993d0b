"""Sampling by the native kernels, which read each row once or twice and sort nothing.

The token of a row depends only on its logits, parameters and position, not on the batch or the number of threads. Draws
differ from `worker/torch_sampling.py` only where the uniform number is within rounding of the boundary between
two tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from chairlift.kernels.cpu import load, native
from chairlift.kernels.sampling import Bits, IntArray, SamplingParameters, TokenSampler


class NativeSampling:
    """Implements `SamplingKernels` for float32 logits on the CPU.

    Raises:
        KernelsUnavailableError: the extension cannot be loaded.
    """

    def __init__(self) -> None:
        load()

    def make_sampler(self, parameters: SamplingParameters) -> TokenSampler:
        """A sampler that does not change the logits."""
        p = parameters
        sampler = native.TokenSampler(p.is_random, p.temperature, p.top_k, p.top_p, p.min_p, p.keys, p.positions)

        def sample(logits: torch.Tensor, rows: IntArray) -> torch.Tensor:
            _check(logits)
            token_ids: IntArray = np.empty(len(rows), np.int64)
            sampler.sample(logits.data_ptr(), logits.shape[1], rows, token_ids)
            return torch.from_numpy(token_ids)

        return sample

    def mask(self, logits: torch.Tensor, index: IntArray, masks: Bits) -> None:
        _check(logits)
        native.mask_rows(logits.data_ptr(), logits.shape[1], index, masks)

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _check(logits)
        num_rows, vocab_size = logits.shape
        shape = (num_rows, 1 + min(num_top, vocab_size))
        ids, ranks = np.empty(shape, np.int64), np.empty(shape, np.int64)
        values = np.empty(shape, np.float32)
        native.logprobs(logits.data_ptr(), vocab_size, token_ids.numpy(), ids, values, ranks)
        return torch.from_numpy(ids), torch.from_numpy(values), torch.from_numpy(ranks)


def _check(logits: torch.Tensor) -> None:
    assert logits.dtype == torch.float32, "logits must be float32"
    assert logits.device.type == "cpu", "logits must be in host memory"
    assert logits.is_contiguous(), "logits must be contiguous"
