"""Sampler: chooses one token for each request from the logits of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from chairlift.kernels.sampling import IntArray, SamplingKernels
from chairlift.outputs import TokenLogprobs
from chairlift.worker.logprobs import LogprobTensors
from chairlift.worker.request_rows import RequestRows
from chairlift.worker.sampling_state import SamplingFeature, SamplingState
from chairlift.worker.token_masks import TokenMasks
from chairlift.worker.torch_sampling import apply_penalties
from chairlift.worker.transfer import to_device

FeatureArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each request, and logprobs for requests with the parameter `logprobs`.

    Attributes:
        token_ids: int64 [N], on the device.
        logprob_index: the ascending positions in the batch that `logprobs` describes.
        num_top: the number of most likely tokens to return at each of these positions.
        errors: position in the batch -> error of a request that cannot continue; its token is undefined.
    """

    token_ids: torch.Tensor
    logprobs: LogprobTensors | None = None
    logprob_index: list[int] | None = None
    num_top: list[int] | None = None
    errors: dict[int, str] = field(default_factory=dict)

    def to_host(self) -> SampledTokens:
        """Start a copy to the host without waiting; it is complete when the device has finished its queued work."""
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        return replace(self, token_ids=self.token_ids.to("cpu", non_blocking=True), logprobs=logprobs)

    def logprob_records(self) -> dict[int, TokenLogprobs]:
        """Position in the batch -> logprobs; waits for the device."""
        if self.logprobs is None or self.logprob_index is None or self.num_top is None:
            return {}
        return dict(zip(self.logprob_index, self.logprobs.records(self.num_top), strict=True))


class Sampler:
    """Samples for any mix of requests in one pass. Steps that no request of the batch needs are skipped.

    The logits are changed in this order: min_tokens mask, logit_bias, penalties, bad words, mask of the grammar or of
    allowed tokens. Greedy requests then take the argmax. The others apply temperature, min_p, top_k and top_p (vLLM's
    order) and draw once by inverse transform, which needs one random number for each row, while the Gumbel trick needs
    one for each token. Logprobs are those of the unchanged logits.

    Args:
        state: the sampling parameters by row.
        rows: the tokens and lengths of the requests.
        masks: the masks of constrained requests.
        sampling: the kernels that choose tokens.
    """

    def __init__(self, state: SamplingState, rows: RequestRows, masks: TokenMasks, sampling: SamplingKernels) -> None:
        self._state = state
        self._rows = rows
        self._masks = masks
        self._sampling = sampling
        self._choose = sampling.make_sampler(state.parameters(rows.num_tokens))
        self._device = rows.device
        self._counts = torch.zeros(0, device=rows.device)

    def sample(self, logits: torch.Tensor, rows: IntArray) -> SampledTokens:
        """Sample the next token of each row.

        Args:
            logits: float32 [N, V], contiguous; overwritten.
            rows: int64 [N], on the host: the rows of the requests in the state.
        """
        if not self._state.num_with_features:
            return SampledTokens(self._choose(logits, rows))
        features: FeatureArray = self._state.features[rows]
        needed = int(np.bitwise_or.reduce(features))
        with_logprobs = np.flatnonzero(features & SamplingFeature.LOGPROBS)
        raw = logits[to_device(with_logprobs, self._device)] if len(with_logprobs) else None
        if needed & SamplingFeature.MIN_TOKENS:
            self._mask_stop_tokens(logits, rows, features)
        if needed & SamplingFeature.LOGIT_BIAS:
            self._add_bias(logits, rows, features)
        if needed & SamplingFeature.PENALTIES:
            self._apply_penalties(logits, rows, features)
        if needed & SamplingFeature.BAD_WORDS:
            self._mask_bad_words(logits, rows, features)
        errors = self._apply_masks(logits, rows, features) if needed & SamplingFeature.MASK else {}
        token_ids = self._choose(logits, rows)
        if raw is None:
            return SampledTokens(token_ids, errors=errors)
        num_top = self._state.num_logprobs[rows[with_logprobs]]
        chosen = token_ids[to_device(with_logprobs, self._device)]
        logprobs = LogprobTensors(*self._sampling.logprobs(raw, chosen, int(num_top.max())))
        return SampledTokens(token_ids, logprobs, with_logprobs.tolist(), num_top.tolist(), errors)

    def _apply_masks(self, logits: torch.Tensor, rows: IntArray, features: FeatureArray) -> dict[int, str]:
        masked = np.flatnonzero(features & SamplingFeature.MASK)
        self._sampling.mask(logits, masked, self._masks.fill(rows[masked]))
        errors = zip(masked.tolist(), map(self._masks.error, rows[masked].tolist()), strict=True)
        return {index: error for index, error in errors if error is not None}

    def _mask_bad_words(self, logits: torch.Tensor, rows: IntArray, features: FeatureArray) -> None:
        index = np.flatnonzero(features & SamplingFeature.BAD_WORDS)
        words = [self._state.bad_words[row] for row in rows[index].tolist()]
        starts = [
            max(int(self._rows.num_prompt_tokens[row]), int(self._rows.num_tokens[row]) - word.max_before)
            for row, word in zip(rows[index].tolist(), words, strict=True)
        ]
        outputs = self._rows.tokens_from(rows[index].tolist(), starts)
        completing = [word.completing_tokens(output) for word, output in zip(words, outputs, strict=True)]
        flat = np.repeat(index, [len(ids) for ids in completing]) * logits.shape[1] + np.concatenate(completing)
        logits.view(-1)[to_device(flat, self._device)] = -torch.inf

    def _mask_stop_tokens(self, logits: torch.Tensor, rows: IntArray, features: FeatureArray) -> None:
        num_output = self._rows.num_tokens[rows] - self._rows.num_prompt_tokens[rows]
        masked = np.flatnonzero(
            (features & SamplingFeature.MIN_TOKENS).astype(bool) & (num_output < self._state.min_tokens[rows])
        )
        if not len(masked):
            return
        stop_ids = [self._state.stop_ids[row] for row in rows[masked].tolist()]
        flat = np.repeat(masked, [len(ids) for ids in stop_ids]) * logits.shape[1] + np.concatenate(stop_ids)
        logits.view(-1)[to_device(flat, self._device)] = -torch.inf

    def _add_bias(self, logits: torch.Tensor, rows: IntArray, features: FeatureArray) -> None:
        biased = np.flatnonzero(features & SamplingFeature.LOGIT_BIAS)
        token_ids, amounts = zip(*(self._state.bias[row] for row in rows[biased].tolist()), strict=True)
        flat = np.repeat(biased, [len(ids) for ids in token_ids]) * logits.shape[1] + np.concatenate(token_ids)
        logits.view(-1)[to_device(flat, self._device)] += to_device(np.concatenate(amounts), self._device)

    def _apply_penalties(self, logits: torch.Tensor, rows: IntArray, features: FeatureArray) -> None:
        state, device = self._state, self._device
        penalised = np.flatnonzero(features & SamplingFeature.PENALTIES)
        chosen = rows[penalised]
        lengths = to_device(self._rows.num_tokens[chosen], device)[:, None]
        prompts = to_device(self._rows.num_prompt_tokens[chosen], device)[:, None]
        positions = torch.arange(int(self._rows.num_tokens[chosen].max()), device=device)
        token_ids = self._rows.token_ids[to_device(chosen, device), : len(positions)].long()
        # Beyond its end a row repeats its first token, which has occurred in any case.
        token_ids = torch.where(positions < lengths, token_ids, token_ids[:, :1])
        is_output = ((positions >= prompts) & (positions < lengths)).float()
        penalties = np.stack((state.repetition_penalty, state.presence_penalty, state.frequency_penalty))[:, chosen]
        if self._counts.numel() < logits.numel():
            self._counts = torch.zeros(logits.numel(), device=device)
        index = to_device(penalised, device)[:, None]
        apply_penalties(logits, index, token_ids, is_output, to_device(penalties, device)[:, :, None], self._counts)
