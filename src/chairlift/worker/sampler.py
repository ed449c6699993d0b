"""The sampler: logits of a batch to one token a request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from chairlift.kernels.sampling import IntArray, SamplingKernels
from chairlift.outputs import TokenLogprobs
from chairlift.worker import sampling_ops
from chairlift.worker.logprobs import LogprobTensors
from chairlift.worker.request_rows import RequestRows
from chairlift.worker.sampling_state import SamplingFeature, SamplingState
from chairlift.worker.token_masks import TokenMasks
from chairlift.worker.transfer import to_device

NeedsArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token a request, and logprobs for those who asked.

    Attributes:
        token_ids: int64 [N], on the device.
        logprob_index: the positions in the batch, ascending, that `logprobs` describes.
        num_top: likeliest tokens wanted at each of them.
        errors: position in the batch -> why this request cannot go on; its token means nothing.
    """

    token_ids: torch.Tensor
    logprobs: LogprobTensors | None = None
    logprob_index: list[int] | None = None
    num_top: list[int] | None = None
    errors: dict[int, str] = field(default_factory=dict)

    def to_host(self) -> SampledTokens:
        """A copy that is complete once the device has caught up; the host does not wait for it."""
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        return replace(self, token_ids=self.token_ids.to("cpu", non_blocking=True), logprobs=logprobs)

    def logprob_records(self) -> dict[int, TokenLogprobs]:
        """Position in the batch -> logprobs, for those who asked; waits for the device."""
        if self.logprobs is None or self.logprob_index is None or self.num_top is None:
            return {}
        return dict(zip(self.logprob_index, self.logprobs.records(self.num_top), strict=True))


class Sampler:
    """Samples for any mix of requests in one pass; what nobody in the batch needs is skipped.

    First the logits change: min_tokens mask, logit_bias, penalties, bad words, mask of grammar or allowed tokens. Then
    argmax where greedy; elsewhere temperature, min_p, top_k, top_p (vLLM's order) and one draw by inverse transform.
    Logprobs are of the raw distribution, before any of this. Inverse transform costs one random number a row, where the
    Gumbel trick would cost one a token.

    Args:
        state: the parameters, by row.
        rows: the requests; read for tokens and lengths only.
        masks: of constrained requests.
        sampling: the kernels that choose.
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
        """The token at position num_tokens of each row.

        Args:
            logits: float32 [N, V], contiguous; overwritten.
            rows: int64 [N], on the host.
        """
        if not self._state.num_with_features:
            return SampledTokens(self._choose(logits, rows))
        needs: NeedsArray = self._state.needs[rows]
        anybody = int(np.bitwise_or.reduce(needs))
        asking = np.flatnonzero(needs & SamplingFeature.LOGPROBS)
        raw = logits[to_device(asking, self._device)] if len(asking) else None
        if anybody & SamplingFeature.MIN_TOKENS:
            self._mask_stop_tokens(logits, rows, needs)
        if anybody & SamplingFeature.LOGIT_BIAS:
            self._add_bias(logits, rows, needs)
        if anybody & SamplingFeature.PENALTIES:
            self._apply_penalties(logits, rows, needs)
        if anybody & SamplingFeature.BAD_WORDS:
            self._mask_bad_words(logits, rows, needs)
        errors = self._apply_masks(logits, rows, needs) if anybody & SamplingFeature.MASK else {}
        token_ids = self._choose(logits, rows)
        if raw is None:
            return SampledTokens(token_ids, errors=errors)
        num_top = self._state.num_logprobs[rows[asking]]
        chosen = token_ids[to_device(asking, self._device)]
        logprobs = LogprobTensors(*self._sampling.logprobs(raw, chosen, int(num_top.max())))
        return SampledTokens(token_ids, logprobs, asking.tolist(), num_top.tolist(), errors)

    def _apply_masks(self, logits: torch.Tensor, rows: IntArray, needs: NeedsArray) -> dict[int, str]:
        masked = np.flatnonzero(needs & SamplingFeature.MASK)
        self._sampling.mask(logits, masked, self._masks.fill(rows[masked]))
        errors = zip(masked.tolist(), map(self._masks.error, rows[masked].tolist()), strict=True)
        return {index: error for index, error in errors if error is not None}

    def _mask_bad_words(self, logits: torch.Tensor, rows: IntArray, needs: NeedsArray) -> None:
        index = np.flatnonzero(needs & SamplingFeature.BAD_WORDS)
        words = [self._state.bad_words[row] for row in rows[index].tolist()]
        starts = [
            max(int(self._rows.num_prompt_tokens[row]), int(self._rows.num_tokens[row]) - word.max_before)
            for row, word in zip(rows[index].tolist(), words, strict=True)
        ]
        answers = self._rows.tokens_from(rows[index].tolist(), starts)
        completing = [word.completing(answer) for word, answer in zip(words, answers, strict=True)]
        flat = np.repeat(index, [len(ids) for ids in completing]) * logits.shape[1] + np.concatenate(completing)
        logits.view(-1)[to_device(flat, self._device)] = -torch.inf

    def _mask_stop_tokens(self, logits: torch.Tensor, rows: IntArray, needs: NeedsArray) -> None:
        num_output = self._rows.num_tokens[rows] - self._rows.num_prompt_tokens[rows]
        masked = np.flatnonzero(
            (needs & SamplingFeature.MIN_TOKENS).astype(bool) & (num_output < self._state.min_tokens[rows])
        )
        if not len(masked):
            return
        stop_ids = [self._state.stop_ids[row] for row in rows[masked].tolist()]
        flat = np.repeat(masked, [len(ids) for ids in stop_ids]) * logits.shape[1] + np.concatenate(stop_ids)
        logits.view(-1)[to_device(flat, self._device)] = -torch.inf

    def _add_bias(self, logits: torch.Tensor, rows: IntArray, needs: NeedsArray) -> None:
        biased = np.flatnonzero(needs & SamplingFeature.LOGIT_BIAS)
        token_ids, amounts = zip(*(self._state.bias[row] for row in rows[biased].tolist()), strict=True)
        flat = np.repeat(biased, [len(ids) for ids in token_ids]) * logits.shape[1] + np.concatenate(token_ids)
        logits.view(-1)[to_device(flat, self._device)] += to_device(np.concatenate(amounts), self._device)

    def _apply_penalties(self, logits: torch.Tensor, rows: IntArray, needs: NeedsArray) -> None:
        state, device = self._state, self._device
        penalised = np.flatnonzero(needs & SamplingFeature.PENALTIES)
        chosen = rows[penalised]
        lengths = to_device(self._rows.num_tokens[chosen], device)[:, None]
        prompts = to_device(self._rows.num_prompt_tokens[chosen], device)[:, None]
        positions = torch.arange(int(self._rows.num_tokens[chosen].max()), device=device)
        token_ids = self._rows.token_ids[to_device(chosen, device), : len(positions)].long()
        # Past its end a row repeats its first token, which occurred anyway.
        token_ids = torch.where(positions < lengths, token_ids, token_ids[:, :1])
        is_output = ((positions >= prompts) & (positions < lengths)).float()
        penalties = np.stack((state.repetition_penalty, state.presence_penalty, state.frequency_penalty))[:, chosen]
        if self._counts.numel() < logits.numel():
            self._counts = torch.zeros(logits.numel(), device=device)
        index = to_device(penalised, device)[:, None]
        sampling_ops.apply_penalties(
            logits, index, token_ids, is_output, to_device(penalties, device)[:, :, None], self._counts
        )
