"""The interface of a kernel set. Layers and models call its functions and do not depend on which set it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chairlift.kernels.backend import AttentionBackend, AttentionShape, StepContext
from chairlift.kernels.linear import LinearKernel, Prologue, RowKernel
from chairlift.kernels.weights import MatrixParts, Weights

Layer = Callable[[torch.Tensor, StepContext], torch.Tensor]
"""(x [T, hidden_size], the context of the step) -> [T, hidden_size]; x may be overwritten."""


def run_in_order(layers: Sequence[Layer], x: torch.Tensor, step: StepContext) -> torch.Tensor:
    """Call the layers one after the other, each with the result of the layer before."""
    for layer in layers:
        x = layer(x, step)
    return x


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a step. Shapes and results are those of `chairlift.kernels.reference`.

    `load_matrix` returns a matrix in the form that the set multiplies fastest. Embedding and LM head share one matrix
    where they are tied.

    Attributes:
        load_matrix: (weights, parts, in_features) -> matrix.
        make_embedding: (matrix) -> int64 ids [T] -> rows [T, in].
        make_linear: (matrix, bias [out] or None, prologue) -> x [T, in], residual -> [T, out].
        make_prologue: a prologue without a product after it.
        attention: (shape) -> the attention backend of a model.
        notes: lines to log once a model is loaded.
        run_layers: `run_in_order` for layers that only call functions of this set.
    """

    name: str
    load_matrix: Callable[[Weights, MatrixParts, int], Any]
    make_embedding: Callable[[Any], RowKernel]
    make_linear: Callable[[Any, torch.Tensor | None, Prologue], LinearKernel]
    make_prologue: Callable[[Prologue], RowKernel]
    attention: Callable[[AttentionShape], AttentionBackend[Any]]
    notes: Callable[[], list[str]] = list
    run_layers: Callable[[Sequence[Layer], torch.Tensor, StepContext], torch.Tensor] = run_in_order
