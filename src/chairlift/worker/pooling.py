"""Pooling: the vectors or scores of requests that generate no tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from chairlift.worker.encoder_runner import pooled_rows
from chairlift.worker.request_rows import to_device
from chairlift.worker.step_extension import ComputedStep, StepExtension


class Pooling(StepExtension):
    """Computes the vectors of requests whose last token is computed.

    Args:
        pooler: computes vectors [N, size] from hidden states [N, hidden_size] of last tokens.
    """

    def __init__(self, pooler: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._pooler = pooler

    def read_hidden(self, step: ComputedStep) -> None:
        batch = step.batch
        chosen = np.flatnonzero(batch.samples)
        if len(chosen):
            vectors = self._pooler(step.hidden[to_device(batch.token_end[chosen] - 1, step.hidden.device)])
            step.results.pooled = pooled_rows([batch.request_ids[i] for i in chosen.tolist()], vectors)
