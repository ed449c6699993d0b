"""LogitsTap: a model that records the logits it computes while an engine runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from chairlift.models.decoder import DecoderModel


class LogitsTap(DecoderModel):
    """A model with the layers and KV memory of another one, which can record its logits."""

    def __init__(self, model: DecoderModel) -> None:
        vars(self).update(vars(model))
        self._pieces: list[torch.Tensor] | None = None

    @contextmanager
    def record(self) -> Iterator[list[torch.Tensor]]:
        """Yield a list to which copies of all logits are appended: float32 [rows, V] each, in the order of the
        calls."""
        pieces: list[torch.Tensor] = []
        self._pieces = pieces
        try:
            yield pieces
        finally:
            self._pieces = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        if self._pieces is not None:
            self._pieces.append(logits.clone())
        return logits
