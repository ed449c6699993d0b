"""The kernels of the sets "torch" and "reference", which need no extension module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from chairlift.kernels import reference, torch_ops
from chairlift.kernels.grouped_mixture import GroupedMixture
from chairlift.kernels.interface import (
    ComposedLinear,
    ComposedResidualSum,
    Kernels,
    LinearKernel,
    Prologue,
    RowKernel,
)
from chairlift.kernels.lora import AdaptedLinear, LoraLayer
from chairlift.kernels.reference_recurrence import ReferenceRecurrence
from chairlift.kernels.torch_attention import TorchAttention
from chairlift.kernels.torch_recurrence import TorchRecurrence
from chairlift.kernels.weights import load_tensor


def _reference_linear(weight: torch.Tensor, bias: torch.Tensor | None, prologue: Prologue) -> LinearKernel:
    return ComposedLinear(_reference_prologue(prologue), partial(reference.linear, weight=weight, bias=bias))


def _reference_prologue(prologue: Prologue) -> RowKernel:
    return partial(reference.apply_prologue, prologue=prologue)


def _torch_linear(weight: torch.Tensor, bias: torch.Tensor | None, prologue: Prologue) -> LinearKernel:
    packs = torch_ops.PackedLinear.supports(weight)
    product = torch_ops.PackedLinear(weight, bias) if packs else partial(F.linear, weight=weight, bias=bias)
    return ComposedLinear(None if prologue.kind == "none" else torch_ops.make_prologue(prologue), product)


def _add_lora(
    base: LinearKernel, prologue: Prologue, layer: LoraLayer, make_prologue: Callable[[Prologue], RowKernel]
) -> LinearKernel:
    return AdaptedLinear(base, None if prologue.kind == "none" else make_prologue(prologue), layer)


REFERENCE = Kernels(
    name="reference",
    load_matrix=load_tensor,
    load_router=load_tensor,
    make_embedding=lambda table: partial(reference.embedding, table=table),
    make_linear=_reference_linear,
    add_lora=partial(_add_lora, make_prologue=_reference_prologue),
    make_residual_sum=partial(ComposedResidualSum, make_prologue=_reference_prologue),
    make_mixture=reference.ReferenceMixture,
    make_recurrence=ReferenceRecurrence,
    gate=reference.gate,
    attention=reference.ReferenceAttention,
)

TORCH = Kernels(
    name="torch",
    load_matrix=load_tensor,
    load_router=load_tensor,
    make_embedding=lambda table: partial(F.embedding, weight=table),
    make_linear=_torch_linear,
    add_lora=partial(_add_lora, make_prologue=torch_ops.make_prologue),
    make_residual_sum=partial(ComposedResidualSum, make_prologue=torch_ops.make_prologue),
    make_mixture=partial(GroupedMixture, make_linear=_torch_linear, make_prologue=torch_ops.make_prologue),
    make_recurrence=TorchRecurrence,
    gate=torch_ops.gate,
    attention=TorchAttention,
)

PORTABLE_KERNELS = {kernels.name: kernels for kernels in (REFERENCE, TORCH)}
"""Both sets by name."""
