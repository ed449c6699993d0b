"""A model that lets somebody see its logits while an engine runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from chairlift.kernels.attention import AttentionMetadata
from chairlift.layers.attention import Attention
from chairlift.models.decoder import LanguageModel


class LogitsTap(LanguageModel):
    """Another model, unchanged, and a recorder of the logits that are asked of it."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model.config, model.attention_backends)
        self._model = model
        self._pieces: list[torch.Tensor] | None = None

    @contextmanager
    def record(self) -> Iterator[list[torch.Tensor]]:
        """Gives a list that gets a copy of all logits until the end: float32 [rows, V] each, in the order of asking."""
        pieces: list[torch.Tensor] = []
        self._pieces = pieces
        try:
            yield pieces
        finally:
            self._pieces = None

    @property
    def attention_layers(self) -> Sequence[Attention]:
        return self._model.attention_layers

    def plan(self, metadata: AttentionMetadata) -> Any:
        return self._model.plan(metadata)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        self._model.allocate_kv_cache(num_blocks, block_size)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        return self._model.forward(token_ids, positions, plan)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(hidden)
        if self._pieces is not None:
            self._pieces.append(logits.clone())
        return logits
