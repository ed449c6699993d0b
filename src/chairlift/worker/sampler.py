"""Sampler: chooses one token for each request from the logits of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from chairlift.grammar.compiler import GrammarCompiler
from chairlift.kernels.device_copy import to_device
from chairlift.kernels.sampling import IntArray, SamplingKernels
from chairlift.outputs import Logprob, NewRequest, TokenLogprobs
from chairlift.worker.request_rows import RequestRows
from chairlift.worker.sampling_state import SamplingFeature, SamplingState
from chairlift.worker.token_masks import TokenMasks
from chairlift.worker.torch_sampling import TorchSampling, apply_penalties

FeatureArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """The logprobs at N positions: column 0 has the given token, the others the K most likely tokens in order.

    Attributes:
        token_ids: int64 [N, 1 + K].
        logprobs: float32 [N, 1 + K].
        ranks: int64 [N, 1 + K]; 1 + the number of more likely tokens, so equally likely tokens share a rank.
        num_top: the number of most likely tokens to return at each position, at most K.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    num_top: Sequence[int]

    def to_host(self) -> LogprobTensors:
        """Start a copy to the host without waiting; it is complete when the device has finished its queued work."""
        names = ("token_ids", "logprobs", "ranks")
        return replace(self, **{name: getattr(self, name).to("cpu", non_blocking=True) for name in names})

    def records(self) -> list[TokenLogprobs]:
        """One record for each position; waits for the device."""
        columns = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        entries = [list(map(Logprob, *column)) for column in columns]
        return [TokenLogprobs(entry[0], entry[1 : 1 + k]) for entry, k in zip(entries, self.num_top, strict=True)]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each request, and logprobs for requests with the parameter `logprobs`.

    Attributes:
        token_ids: int64 [N], on the device.
        logprob_index: the ascending positions in the batch that `logprobs` describes.
        errors: position in the batch -> error of a request that cannot continue; its token is undefined.
        positions: the requests, as positions in `PendingStep.request_ids`, if the tokens follow accepted draft tokens.
    """

    token_ids: torch.Tensor
    logprobs: LogprobTensors | None = None
    logprob_index: Sequence[int] = ()
    errors: dict[int, str] = field(default_factory=dict)
    positions: Sequence[int] = ()

    def to_host(self) -> SampledTokens:
        """Start a copy to the host without waiting; it is complete when the device has finished its queued work."""
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        return replace(self, token_ids=self.token_ids.to("cpu", non_blocking=True), logprobs=logprobs)

    def logprob_records(self) -> dict[int, TokenLogprobs]:
        """Position in the batch -> logprobs; waits for the device."""
        return {} if self.logprobs is None else dict(zip(self.logprob_index, self.logprobs.records(), strict=True))


class Sampler:
    """Samples for any mix of requests in one pass. Steps that no request of the batch needs are skipped.

    The logits are changed in this order: min_tokens mask, logit_bias, penalties, bad words, mask of the grammar or of
    allowed tokens. Greedy requests then take the argmax. The others apply temperature, min_p, top_k and top_p (vLLM's
    order) and draw once by inverse transform, which needs one random number for each row, while the Gumbel trick needs
    one for each token. Logprobs come from the unchanged logits.

    Args:
        state: the sampling parameters by row.
        rows: the tokens and lengths of the requests.
        masks: the masks of constrained requests.
        sampling: the kernels that choose tokens.

    Attributes:
        choose: chooses tokens from logits, without changing these for the features of the requests.
    """

    def __init__(self, state: SamplingState, rows: RequestRows, masks: TokenMasks, sampling: SamplingKernels) -> None:
        self.state = state
        self._rows = rows
        self._masks = masks
        self.sampling = sampling
        self.choose = sampling.make_sampler(state.parameters(rows.num_tokens))
        self._device = rows.device
        self._counts = torch.zeros(0, device=rows.device)
        self._changes = (
            (SamplingFeature.MIN_TOKENS, self._mask_stop_tokens),
            (SamplingFeature.LOGIT_BIAS, self._add_bias),
            (SamplingFeature.PENALTIES, self._apply_penalties),
            (SamplingFeature.BAD_WORDS, self._mask_bad_words),
        )

    @classmethod
    def of_rows(
        cls,
        rows: RequestRows,
        vocab_size: int,
        sampling: SamplingKernels | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> Sampler:
        """A sampler of `vocab_size` logits for requests in these rows, by default with the kernels of torch. Without
        `grammars` none may have a grammar."""
        state, masks = SamplingState(rows.max_num_seqs, vocab_size), TokenMasks(rows, vocab_size, grammars)
        return cls(state, rows, masks, sampling or TorchSampling())

    def add(self, row: int, new: NewRequest) -> None:
        """Add a request, which has this row."""
        self.state.add(row, new)
        self._masks.add(row, new)

    def remove(self, row: int) -> None:
        """Remove the request of this row."""
        self._masks.remove(row)
        self.state.remove(row)

    def sample(self, logits: torch.Tensor, rows: IntArray) -> SampledTokens:
        """Sample the next token of each row.

        Args:
            logits: float32 [N, V], contiguous; overwritten.
            rows: int64 [N], on the host: the rows of the requests in the state.
        """
        if not self.state.num_with_features:
            return SampledTokens(self.choose(logits, rows))
        features: FeatureArray = self.state.features[rows]
        needed = int(np.bitwise_or.reduce(features))
        with_logprobs = np.flatnonzero(features & SamplingFeature.LOGPROBS)
        raw = logits[to_device(with_logprobs, self._device)] if len(with_logprobs) else None
        for feature, change in self._changes:
            if needed & feature:
                index = np.flatnonzero(features & feature)
                change(logits, index, rows[index])
        errors = {}
        if needed & SamplingFeature.MASK:
            masked = np.flatnonzero(features & SamplingFeature.MASK)
            self.sampling.mask(logits, masked, self._masks.fill(rows[masked]))
            found = zip(masked.tolist(), map(self._masks.error, rows[masked].tolist()), strict=True)
            errors = {index: error for index, error in found if error is not None}
        token_ids = self.choose(logits, rows)
        if raw is None:
            return SampledTokens(token_ids, errors=errors)
        num_top = self.state.num_logprobs[rows[with_logprobs]]
        chosen = token_ids[to_device(with_logprobs, self._device)]
        logprobs = LogprobTensors(*self.sampling.logprobs(raw, chosen, int(num_top.max())), num_top.tolist())
        return SampledTokens(token_ids, logprobs, with_logprobs.tolist(), errors)

    def _mask_bad_words(self, logits: torch.Tensor, index: IntArray, rows: IntArray) -> None:
        words = [self.state.bad_words[row] for row in rows.tolist()]
        starts = [
            max(int(self._rows.num_prompt_tokens[row]), int(self._rows.num_tokens[row]) - word.max_before)
            for row, word in zip(rows.tolist(), words, strict=True)
        ]
        outputs = self._rows.tokens_from(rows.tolist(), starts)
        completing = [word.completing_tokens(output) for word, output in zip(words, outputs, strict=True)]
        logits.view(-1)[self._flat_index(logits, index, completing)] = -torch.inf

    def _mask_stop_tokens(self, logits: torch.Tensor, index: IntArray, rows: IntArray) -> None:
        num_output = self._rows.num_tokens[rows] - self._rows.num_prompt_tokens[rows]
        is_early = num_output < self.state.min_tokens[rows]
        if is_early.any():
            stop_ids = [self.state.stop_ids[row] for row in rows[is_early].tolist()]
            logits.view(-1)[self._flat_index(logits, index[is_early], stop_ids)] = -torch.inf

    def _add_bias(self, logits: torch.Tensor, index: IntArray, rows: IntArray) -> None:
        token_ids, amounts = zip(*(self.state.bias[row] for row in rows.tolist()), strict=True)
        flat = self._flat_index(logits, index, token_ids)
        logits.view(-1)[flat] += to_device(np.concatenate(amounts), self._device)

    def _flat_index(self, logits: torch.Tensor, index: IntArray, token_ids: Sequence[IntArray]) -> torch.Tensor:
        """The positions of the tokens `token_ids[i]` of row `index[i]` in the flattened logits."""
        flat = np.repeat(index, [len(ids) for ids in token_ids]) * logits.shape[1] + np.concatenate(token_ids)
        return to_device(flat, self._device)

    def _apply_penalties(self, logits: torch.Tensor, index: IntArray, rows: IntArray) -> None:
        device = self._device
        lengths = to_device(self._rows.num_tokens[rows], device)[:, None]
        prompts = to_device(self._rows.num_prompt_tokens[rows], device)[:, None]
        positions = torch.arange(int(self._rows.num_tokens[rows].max()), device=device)
        token_ids = self._rows.token_ids[to_device(rows, device), : len(positions)].long()
        # Beyond its end a row repeats its first token, which has occurred in any case.
        token_ids = torch.where(positions < lengths, token_ids, token_ids[:, :1])
        is_output = ((positions >= prompts) & (positions < lengths)).float()
        if self._counts.numel() < logits.numel():
            self._counts = torch.zeros(logits.numel(), device=device)
        penalties = to_device(self.state.penalties[:, rows], device)[:, :, None]
        batch_index = to_device(index, device)[:, None]
        apply_penalties(logits, batch_index, token_ids, is_output, penalties, self._counts)
