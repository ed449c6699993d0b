"""LoRA adapters (Hu et al., 2021) in the linear layers of a model: y = base(x) + scale * B (A prologue(x)).

Each row of a step has the slot of an adapter, or -1. All matrices of a slot are allocated with the model, for the
largest rank, so that loading an adapter needs no further memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from chairlift.kernels.weights import MatrixParts

IntArray = npt.NDArray[np.int64]
NO_ADAPTER = -1


@dataclass(frozen=True, slots=True, eq=False)
class LoraPart:
    """The matrices of all adapters for one matrix [outputs, inputs] of the model.

    Attributes:
        a: [slots, max_rank, inputs].
        b: [slots, max_rank, outputs], transposed, and multiplied by the scale of the adapter.
        ranks: int32 [slots], on the host; 0 for an adapter without this matrix. Later rows of a and b are not read.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: npt.NDArray[np.int32]

    @property
    def outputs(self) -> int:
        return self.b.shape[2]


class LoraBatch:
    """The adapter slots of the rows of the current step, which all layers share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: IntArray = np.zeros(0, dtype=np.int64)
        self._groups: list[tuple[int, torch.Tensor]] | None = []
        self._observers: list[Callable[[IntArray], None]] = []

    def observe(self, on_change: Callable[[IntArray], None]) -> None:
        """Call `on_change` with the slots of each step."""
        self._observers.append(on_change)

    def set_slots(self, slots: IntArray) -> None:
        """Set the slot of each row of the next step, int64 [T], NO_ADAPTER for none."""
        self._slots, self._groups = slots, None
        for on_change in self._observers:
            on_change(slots)

    @property
    def groups(self) -> list[tuple[int, torch.Tensor]]:
        """The rows, int64, of each slot in the step."""
        if self._groups is None:
            found = np.unique(self._slots[self._slots >= 0]).tolist()
            rows = (np.flatnonzero(self._slots == slot) for slot in found)
            self._groups = [
                (slot, torch.from_numpy(each).to(self._device)) for slot, each in zip(found, rows, strict=True)
            ]
        return self._groups


@dataclass(frozen=True, slots=True, eq=False)
class LoraLayer:
    """The matrices of all adapters for a linear layer, one part for each matrix that it multiplies as one."""

    batch: LoraBatch
    parts: list[LoraPart]


LoraMatrices = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""The matrices of an adapter by the name of the model's matrix: A [rank, inputs], and B [rank, outputs], transposed and
multiplied by the scale."""


class LoraAdapters:
    """The LoRA adapters of a model.

    Args:
        max_loras: the number of slots.
        max_rank: the largest rank of an adapter.
        dtype, device: the type and device of the activations.
    """

    def __init__(self, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_loras = max_loras
        self.max_rank = max_rank
        self.batch = LoraBatch(device)
        self._dtype = dtype
        self._device = device
        self._parts: dict[str, LoraPart] = {}
        self._slots: dict[int, int] = {}

    def layer(self, parts: MatrixParts, in_features: int) -> LoraLayer:
        """Allocate the matrices for a linear layer."""
        rows = self.max_loras, self.max_rank
        zeros = partial(torch.zeros, dtype=self._dtype, device=self._device)
        for name, out in parts:
            ranks = np.zeros(self.max_loras, dtype=np.int32)
            self._parts[name] = LoraPart(zeros((*rows, in_features)), zeros((*rows, out)), ranks)
        return LoraLayer(self.batch, [self._parts[name] for name, _ in parts])

    def slot_of(self, lora_id: int) -> int:
        """The slot of a loaded adapter; NO_ADAPTER for id 0."""
        return self._slots[lora_id] if lora_id else NO_ADAPTER

    def __contains__(self, lora_id: object) -> bool:
        return lora_id in self._slots

    @property
    def num_free(self) -> int:
        """The number of adapters that can still be loaded."""
        return self.max_loras - len(self._slots)

    def load(self, lora_id: int, matrices: LoraMatrices) -> None:
        """Copy an adapter to a free slot. Its matrices have been checked against the model."""
        slot = min(set(range(self.max_loras)) - set(self._slots.values()))
        for name, part in self._parts.items():
            part.ranks[slot] = 0
            if name in matrices:
                a, b = matrices[name]
                part.a[slot, : len(a)] = a
                part.b[slot, : len(b)] = b
                part.ranks[slot] = len(a)
        self._slots[lora_id] = slot

    def unload(self, lora_id: int) -> None:
        """Free the slot of an adapter that no request uses."""
        del self._slots[lora_id]

    def clear(self) -> None:
        """Unload all adapters."""
        self._slots.clear()


class AdaptedLinear:
    """A `LinearKernel` that adds the products of adapters with torch, one adapter after the other.

    Args:
        base: the layer without adapters, with the same prologue.
    """

    def __init__(
        self, base: Callable[..., torch.Tensor], prologue: Callable[[torch.Tensor], torch.Tensor], layer: LoraLayer
    ) -> None:
        self._base = base
        self._prologue = prologue
        self._layer = layer

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self._base(x, residual, out)
        for slot, rows in self._layer.batch.groups:
            inputs = self._prologue(x[rows])
            first = 0
            for part in self._layer.parts:
                if rank := int(part.ranks[slot]):
                    delta = (inputs @ part.a[slot, :rank].t()) @ part.b[slot, :rank]
                    y[:, first : first + part.outputs].index_add_(0, rows, delta)
                first += part.outputs
        return y
