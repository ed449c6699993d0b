"""Pooling: the vectors or scores of requests that generate no tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from chairlift.kernels.device_copy import to_device
from chairlift.models.text_pooling import RowFunctions, TextPooling
from chairlift.outputs import SchedulerOutput
from chairlift.worker.step_extension import ComputedStep, StepExtension

ROWS_AT_ONCE: Final = 256
"""The number of rows whose states after the final norm are in memory at the same time."""


class Pooling(StepExtension):
    """Computes the vectors or scores of requests whose last token is computed.

    Args:
        of_hidden: the values of tokens that are pooled, float32 [N, size], from hidden states [N, hidden_size]: states
            after the final norm, or numbers that become scores.
    """

    def __init__(self, of_hidden: Callable[[torch.Tensor], torch.Tensor], functions: RowFunctions) -> None:
        self._of_hidden = of_hidden
        self._functions = functions
        self._texts: dict[str, TextPooling] = {}

    def begin(self, output: SchedulerOutput) -> None:
        for request_id in output.removed:
            self._texts.pop(request_id, None)

    def read_hidden(self, step: ComputedStep) -> None:
        batch, functions = step.batch, self._functions
        chosen = np.flatnonzero(batch.samples)
        if not functions.pooling.reads_last_token_only:
            finished = self._add_states(step)
            pooled = torch.stack(finished) if finished else None
        elif len(chosen):
            pooled = self._states(step.hidden[to_device(batch.token_end[chosen] - 1, step.hidden.device)])
        if len(chosen):
            assert pooled is not None
            step.results.pooled = pooled_rows([batch.request_ids[i] for i in chosen.tolist()], functions.result(pooled))

    def _states(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._functions.of_tokens(self._of_hidden(hidden))

    def _add_states(self, step: ComputedStep) -> list[torch.Tensor]:
        """Add the states of the step to their texts, and return the rows of the texts that are complete."""
        batch, finished = step.batch, []
        for index, request_id in enumerate(batch.request_ids):
            if step.first_positions[index] == 0 or request_id not in self._texts:  # A measured step may have no start.
                self._texts[request_id] = TextPooling(self._functions.pooling)
            end = int(batch.token_end[index])
            for start in range(int(batch.token_start[index]), end, ROWS_AT_ONCE):
                self._texts[request_id].add(self._states(step.hidden[start : min(end, start + ROWS_AT_ONCE)]))
            if batch.samples[index]:
                finished.append(self._texts.pop(request_id).row())
        return finished


def pooled_rows(request_ids: list[str], rows: torch.Tensor) -> dict[str, bytes]:
    """The rows [N, size] of requests as float32 bytes."""
    return {request_id: row.tobytes() for request_id, row in zip(request_ids, rows.float().cpu().numpy(), strict=True)}
