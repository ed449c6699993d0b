"""PromptLogprobs: the logprobs of prompt tokens, for the requests that ask for them."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.kernels.device_copy import to_device
from chairlift.worker.memory import PROMPT_LOGPROB_ROWS
from chairlift.worker.pending_step import PromptLogprobTensors
from chairlift.worker.request_rows import IntArray, RequestRows
from chairlift.worker.runner_model import RunnerModel
from chairlift.worker.sampler import LogprobTensors, Sampler
from chairlift.worker.sampling_state import SamplingFeature
from chairlift.worker.step_extension import ComputedStep, StepExtension


class PromptLogprobs(StepExtension):
    """Computes them from the logits at the token before, PROMPT_LOGPROB_ROWS at a time."""

    def __init__(self, model: RunnerModel, rows: RequestRows, sampler: Sampler) -> None:
        self._model, self._rows, self._sampler = model, rows, sampler

    def read_hidden(self, step: ComputedStep) -> None:
        state, batch = self._sampler.state, step.batch
        if not state.num_with_features:
            return
        with_logprobs = np.flatnonzero(state.features[batch.rows] & SamplingFeature.PROMPT_LOGPROBS)
        spans: list[tuple[str, int, int]] = []
        num_top: list[int] = []
        hidden_index: list[IntArray] = []
        target_index: list[IntArray] = []
        for i in with_logprobs.tolist():
            row = int(batch.rows[i])
            first = int(self._rows.num_computed_tokens[row]) + 1
            count = min(int(batch.num_scheduled[i]), int(self._rows.num_prompt_tokens[row]) - first)
            if count > 0:
                spans.append((batch.request_ids[i], first, count))
                num_top += [int(state.num_prompt_logprobs[row])] * count
                hidden_index.append(batch.token_start[i] + np.arange(count))
                target_index.append(row * self._rows.max_model_len + first + np.arange(count))
        if spans:
            rows, targets = np.concatenate(hidden_index), np.concatenate(target_index)
            logprobs = self._logprobs(step.hidden, rows, targets, num_top)
            step.results.prompt_logprobs = PromptLogprobTensors(spans, logprobs)

    def _logprobs(
        self, hidden: torch.Tensor, index: IntArray, target_index: IntArray, num_top: list[int]
    ) -> LogprobTensors:
        hidden_rows = to_device(index, self._rows.device)
        targets = self._rows.token_ids.view(-1)[to_device(target_index, self._rows.device)].long()
        parts = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            piece = slice(start, start + PROMPT_LOGPROB_ROWS)
            logits = self._model.logits(hidden[hidden_rows[piece]])
            parts.append(self._sampler.sampling.logprobs(logits, targets[piece], max(num_top)))
        token_ids, logprobs, ranks = (torch.cat(column) for column in zip(*parts, strict=True))
        return LogprobTensors(token_ids, logprobs, ranks, num_top)
