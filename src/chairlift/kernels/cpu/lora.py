"""LoRA adapters in native linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chairlift.kernels.cpu import native
from chairlift.kernels.interface import LinearKernel
from chairlift.kernels.lora import IntArray, LoraBatch, LoraLayer
from chairlift.kernels.row_buffers import rows_of

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native


def observe_batch(batch: LoraBatch) -> _native.LoraBatch:
    """A native batch that always has the slots of `batch`."""
    mirror = native.LoraBatch()

    def set_slots(slots: IntArray) -> None:
        mirror.set_slots(slots.ctypes.data, len(slots))

    batch.observe(set_slots)
    return mirror


class NativeAdaptedLinear:
    """A `LinearKernel` that adds the products of adapters in one native call.

    A recording contains this call also if no row has an adapter. It then returns at once.

    Args:
        base, kernel: the layer without adapters, and its layer in the extension.
        batch: the adapters of the rows of a step, from `observe_batch`.
    """

    def __init__(
        self,
        base: LinearKernel,
        kernel: _native.FusedLinear,
        layer: LoraLayer,
        batch: _native.LoraBatch,
    ) -> None:
        self._base = base
        self._layer = layer
        parts = [(part.a.data_ptr(), part.b.data_ptr(), part.ranks.ctypes.data, part.outputs) for part in layer.parts]
        self._kernel = native.LoraLinear(batch, kernel, layer.parts[0].a.shape[1], parts)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self._base(x, residual, out)
        self._kernel(*rows_of(x), len(x), *rows_of(y))
        return y
