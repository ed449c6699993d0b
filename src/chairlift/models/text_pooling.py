"""Vectors from hidden states: pooling, and the modules of sentence-transformers before and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F

from chairlift.models.pooling import PoolingConfig, PoolingMode, RowStep

Rows = Callable[[torch.Tensor], torch.Tensor]
"""A function of rows, float32 [N, num_inputs] -> [N, size]."""


class TextPooling:
    """The pooled states of one text, whose hidden states are added in one or several parts."""

    def __init__(self, pooling: PoolingConfig) -> None:
        self._modes, self._num_unpooled = pooling.modes, pooling.num_unpooled
        self._states: dict[PoolingMode, torch.Tensor] = {}
        self._num_added = self._num_pooled = 0
        self._weight = 0.0

    def add(self, hidden: torch.Tensor) -> None:
        """Add the states of the next tokens, float32 [T, size]."""
        start = max(self._num_added, self._num_unpooled)
        kept = hidden[start - self._num_added :]
        self._num_added += len(hidden)
        for mode in self._modes if len(kept) else ():
            self._states[mode] = self._state(mode, kept, start)
        self._num_pooled += len(kept)
        self._weight += sum(range(start + 1, start + 1 + len(kept)))

    def _state(self, mode: PoolingMode, kept: torch.Tensor, start: int) -> torch.Tensor:
        before = self._states.get(mode)
        if mode == "cls":
            return kept[0].clone() if before is None else before
        if mode == "lasttoken":
            return kept[-1].clone()
        if mode == "max":
            highest = kept.amax(0)
            return highest if before is None else torch.maximum(before, highest)
        if mode == "weightedmean":
            weights = torch.arange(start + 1, start + 1 + len(kept), dtype=kept.dtype, device=kept.device)
            kept = kept * weights[:, None]
        return kept.sum(0) if before is None else before + kept.sum(0)

    def row(self) -> torch.Tensor:
        """The row of the text, float32 [len(modes) * size]. At least one token has been pooled."""
        divisors: Mapping[str, float] = {
            "mean": self._num_pooled,
            "mean_sqrt_len_tokens": self._num_pooled**0.5,
            "weightedmean": self._weight,
        }
        return torch.cat([self._states[mode] / divisors.get(mode, 1.0) for mode in self._modes])


def pool_texts(hidden: Iterable[torch.Tensor], pooling: PoolingConfig) -> torch.Tensor:
    """The rows of whole texts, float32 [N, len(modes) * size], from the states [T, size] of each."""
    rows = []
    for states in hidden:
        text = TextPooling(pooling)
        text.add(states)
        rows.append(text.row())
    return torch.stack(rows)


class RowFunctions:
    """The functions of rows that come before and after the pooling.

    Args:
        load: the parameters of a step by their names in its file.
    """

    def __init__(self, pooling: PoolingConfig, load: Callable[[RowStep], Mapping[str, torch.Tensor]]) -> None:
        self.pooling = pooling
        token_steps, steps = (
            [_row_step(step, load(step) if step.file else {}) for step in group]
            for group in (pooling.token_steps, pooling.steps)
        )
        self._token_steps, self._steps = token_steps, steps
        self._activation = getattr(torch.nn, pooling.activation)()

    def of_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """The states of tokens that are pooled, float32 [T, size], from those of the model."""
        return _apply(self._token_steps, hidden)

    def result(self, pooled: torch.Tensor) -> torch.Tensor:
        """The vectors of texts, float32 [N, vector_size]; or numbers and the scores that the activation makes of them,
        float32 [N, 2]."""
        rows = _apply(self._steps, pooled)
        if self.pooling.task == "score":
            return torch.cat((rows, self._activation(rows)), dim=1)
        return rows[:, : self.pooling.num_kept]


def _apply(functions: Iterable[Rows], rows: torch.Tensor) -> torch.Tensor:
    for function in functions:
        rows = function(rows)
    return rows


def _row_step(step: RowStep, parameters: Mapping[str, torch.Tensor]) -> Rows:
    if step.kind == "normalize":
        return F.normalize
    if step.kind == "layer_norm":
        weight, bias = parameters["norm.weight"], parameters["norm.bias"]
        return lambda rows: F.layer_norm(rows, (step.size,), weight, bias)
    matrix, offset = parameters["linear.weight"], parameters.get("linear.bias")
    activation, residual = getattr(torch.nn, step.activation)(), parameters.get("residual.weight")

    def dense(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = activation(F.linear(rows, matrix, offset))
        if not step.has_residual:
            return out
        return out + (rows if residual is None else F.linear(rows, residual))

    return dense
