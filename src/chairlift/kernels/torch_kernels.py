"""The kernels of the set "torch", which need no extension module."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from chairlift.kernels import torch_ops
from chairlift.kernels.grouped_mixture import GroupedMixture
from chairlift.kernels.interface import ComposedLinear, ComposedResidualSum, Kernels, LinearKernel, Prologue
from chairlift.kernels.lora import AdaptedLinear
from chairlift.kernels.torch_attention import TorchAttention
from chairlift.kernels.torch_recurrence import TorchRecurrence
from chairlift.kernels.weights import load_tensor


def _make_linear(weight: torch.Tensor, bias: torch.Tensor | None, prologue: Prologue) -> LinearKernel:
    packs = torch_ops.PackedLinear.supports(weight)
    product = torch_ops.PackedLinear(weight, bias) if packs else partial(F.linear, weight=weight, bias=bias)
    return ComposedLinear(torch_ops.make_prologue(prologue), product)


TORCH = Kernels(
    name="torch",
    load_matrix=load_tensor,
    load_router=load_tensor,
    make_embedding=lambda table: partial(F.embedding, weight=table),
    make_linear=_make_linear,
    add_lora=lambda base, prologue, layer: AdaptedLinear(base, torch_ops.make_prologue(prologue), layer),
    make_residual_sum=partial(ComposedResidualSum, make_prologue=torch_ops.make_prologue),
    make_mixture=partial(GroupedMixture, make_linear=_make_linear, make_prologue=torch_ops.make_prologue),
    make_recurrence=TorchRecurrence,
    gate=torch_ops.gate,
    attention=TorchAttention,
)
