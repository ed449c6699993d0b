"""Kernel sets by name. A native set replaces functions here; layers and models stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from chairlift.errors import ConfigError
from chairlift.kernels import reference, torch_ops
from chairlift.kernels.backend import AttentionBackend, AttentionShape, ReferenceAttention
from chairlift.kernels.torch_attention import TorchAttention

LinearKernel = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Every kernel that a step needs. Shapes and meaning are those of `chairlift.kernels.reference`.

    Attributes:
        make_linear: (weight [out, in], bias [out] or None) -> x [T, in] -> [T, out]. May keep the weight in an order of
            its own.
        attention: makes the attention backend of a model.
    """

    name: str
    embedding: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    make_linear: Callable[[torch.Tensor, torch.Tensor | None], LinearKernel]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    layer_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    attention: Callable[[AttentionShape], AttentionBackend[Any]]


def _reference_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    return partial(reference.linear, weight=weight, bias=bias)


def _torch_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    if torch_ops.PackedLinear.supports(weight):
        return torch_ops.PackedLinear(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


REFERENCE = Kernels(
    name="reference",
    embedding=reference.embedding,
    make_linear=_reference_linear,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    layer_norm=reference.layer_norm,
    silu_and_mul=reference.silu_and_mul,
    attention=ReferenceAttention,
)

TORCH = Kernels(
    name="torch",
    embedding=F.embedding,
    make_linear=_torch_linear,
    rms_norm=torch_ops.rms_norm,
    add_rms_norm=torch_ops.add_rms_norm,
    layer_norm=torch_ops.layer_norm,
    silu_and_mul=torch_ops.silu_and_mul,
    attention=TorchAttention,
)

KERNELS = {kernels.name: kernels for kernels in (REFERENCE, TORCH)}


def get_kernels(name: str) -> Kernels:
    """The kernel set of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return KERNELS[name]
    except KeyError:
        known = ", ".join(sorted(KERNELS))
        raise ConfigError(f"attention_backend must be one of {known}, got {name!r}") from None
