"""Kernel sets by name. Layers and models call the functions of a set and do not depend on which set it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from chairlift.errors import ConfigError
from chairlift.kernels import reference, torch_ops
from chairlift.kernels.backend import AttentionBackend, AttentionShape, ReferenceAttention, StepContext
from chairlift.kernels.linear import ComposedLinear, LinearKernel, Prologue, RowKernel
from chairlift.kernels.torch_attention import TorchAttention
from chairlift.kernels.weights import MatrixParts, Weights, load_tensor

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


def _reference_embedding(table: torch.Tensor) -> RowKernel:
    return partial(reference.embedding, table=table)


def _reference_linear(weight: torch.Tensor, bias: torch.Tensor | None, prologue: Prologue) -> LinearKernel:
    return ComposedLinear(_reference_prologue(prologue), partial(reference.linear, weight=weight, bias=bias))


def _reference_prologue(prologue: Prologue) -> RowKernel:
    return partial(reference.apply_prologue, prologue=prologue)


def _torch_embedding(table: torch.Tensor) -> RowKernel:
    return partial(F.embedding, weight=table)


def _torch_linear(weight: torch.Tensor, bias: torch.Tensor | None, prologue: Prologue) -> LinearKernel:
    packs = torch_ops.PackedLinear.supports(weight)
    product = torch_ops.PackedLinear(weight, bias) if packs else partial(F.linear, weight=weight, bias=bias)
    return ComposedLinear(None if prologue.kind == "none" else torch_ops.make_prologue(prologue), product)


REFERENCE = Kernels(
    name="reference",
    load_matrix=load_tensor,
    make_embedding=_reference_embedding,
    make_linear=_reference_linear,
    make_prologue=_reference_prologue,
    attention=ReferenceAttention,
)

TORCH = Kernels(
    name="torch",
    load_matrix=load_tensor,
    make_embedding=_torch_embedding,
    make_linear=_torch_linear,
    make_prologue=torch_ops.make_prologue,
    attention=TorchAttention,
)

PORTABLE_KERNELS = {kernels.name: kernels for kernels in (REFERENCE, TORCH)}
"""The kernel sets that need no extension module."""


def get_kernels(name: str, quantization: str | None = None) -> Kernels:
    """The kernel set for one model.

    Args:
        name: "native", "torch" or "reference".
        quantization: see `native_kernels`; None with the other sets.

    Raises:
        ConfigError: The name is unknown, or the set cannot be loaded.
    """
    if name == "native":
        from chairlift.kernels.cpu.kernel_set import native_kernels

        return native_kernels(quantization)
    if name not in PORTABLE_KERNELS:
        raise ConfigError(f"kernels must be one of native, {', '.join(PORTABLE_KERNELS)}, got {name!r}")
    assert quantization is None, "only native kernels quantize"
    return PORTABLE_KERNELS[name]
