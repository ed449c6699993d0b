"""Sampling in torch, on every device; the twin of the native kernels."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.kernels.sampling import Bits, IntArray, SamplingParameters, TokenSampler
from chairlift.worker import sampling_ops
from chairlift.worker.logprobs import gather_logprobs
from chairlift.worker.random_stream import uniform
from chairlift.worker.transfer import to_device


class TorchSampling:
    """Implements `SamplingKernels`."""

    def make_sampler(self, parameters: SamplingParameters) -> TokenSampler:
        return TorchSampler(parameters)

    def mask(self, logits: torch.Tensor, index: IntArray, masks: Bits) -> None:
        device, vocab_size = logits.device, logits.shape[1]
        words = to_device(masks.view(np.int32), device)
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
        at = to_device(index, device)
        logits[at] = logits[at].masked_fill_(bits.view(len(index), -1)[:, :vocab_size] == 0, -torch.inf)

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return gather_logprobs(logits, token_ids, num_top)


class TorchSampler:
    """A `TokenSampler`: whole batches in one pass; what nobody in the batch needs is skipped."""

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
        weights = sampling_ops.weights_(logits, to_device(parameters.temperature[rows], device))
        top_k, top_p, min_p = parameters.top_k[rows], parameters.top_p[rows], parameters.min_p[rows]
        filtered = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
        if len(filtered) == len(rows):
            self._filter(weights, rows)
        elif len(filtered):
            index = to_device(filtered, device)
            weights[index] = self._filter(weights[index], rows[filtered])
        uniforms = uniform(parameters.keys[rows], parameters.positions[rows])
        return sampling_ops.draw(weights, to_device(uniforms, device))

    def _filter(self, weights: torch.Tensor, rows: IntArray) -> torch.Tensor:
        parameters, device = self._parameters, weights.device
        top_k, top_p, min_p = parameters.top_k[rows], parameters.top_p[rows], parameters.min_p[rows]
        return sampling_ops.filter_(
            weights,
            to_device(top_k, device),
            to_device(top_p, device),
            to_device(min_p, device),
            max_top_k=int(top_k.max()),
            any_top_p=bool((top_p < 1).any()),
        )
