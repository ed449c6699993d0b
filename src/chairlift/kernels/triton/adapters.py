"""The products of LoRA adapters: a launch for the rows times A, and one for the sum with the result times B.

Each row has its own adapter and rank, which are read on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from chairlift.kernels.device_copy import to_device
from chairlift.kernels.lora import NO_ADAPTER, IntArray, LoraBatch, LoraLayer, LoraPart
from chairlift.kernels.triton.launch import Launch, aligned, pointer
from chairlift.kernels.triton.products import TritonLinear

MAX_TOKENS: Final = 1 << 20
"""The largest number of rows of a step. Graphs contain the address of their slots, which never changes."""

RANKS: Final = 16
"""The rows of A and of B that a program reads at once."""

INPUTS: Final = 512
OUTPUTS: Final = 128
"""The inputs and outputs that a program reads at once."""


@triton.jit
def _shrink(
    x: tl.tensor, a: tl.tensor, slots: tl.tensor, ranks: tl.tensor, inner: tl.tensor, IN: tl.constexpr,
    MAX_RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a row by A of its slot: inner float32 [T, MAX_RANK]; the grid is (T, blocks of ranks).

    Args:
        x: [T, IN].
        a: [slots, MAX_RANK, IN].
        slots: int32 [T], NO_ADAPTER for none.
        ranks: int32 [slots].
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    rank = tl.load(ranks + slot, mask=slot >= 0, other=0)
    index = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    num_blocks = tl.where(tl.program_id(1) * RANKS < rank, (IN + BLOCK - 1) // BLOCK, 0)
    lines = a + (slot.to(tl.int64) * MAX_RANK + index)[:, None] * IN
    sums = tl.zeros((RANKS,), tl.float32)
    for block in range(num_blocks):
        places = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + row * IN + places, mask=places < IN, other=0.0).to(tl.float32)
        is_value = (index < rank)[:, None] & (places < IN)[None, :]
        factors = tl.load(lines + places[None, :], mask=is_value, other=0.0).to(tl.float32)
        sums += tl.sum(factors * values[None, :], 1)
    tl.store(inner + row * MAX_RANK + index, sums, mask=index < rank)


@triton.jit
def _expand(
    inner: tl.tensor, b: tl.tensor, slots: tl.tensor, ranks: tl.tensor, y: tl.tensor, OUT: tl.constexpr,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, MAX_RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Add a row of `inner` times B of its slot, [slots, MAX_RANK, OUT], to the columns of y [T, WIDTH] from FIRST on;
    the grid is (T, blocks of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    rank = tl.load(ranks + slot, mask=slot >= 0, other=0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for block in range((rank + RANKS - 1) // RANKS):
        index = block * RANKS + tl.arange(0, RANKS)
        values = tl.load(inner + row * MAX_RANK + index, mask=index < rank, other=0.0)
        lines = b + (slot.to(tl.int64) * MAX_RANK + index)[:, None] * OUT
        is_value = (index < rank)[:, None] & (columns < OUT)[None, :]
        factors = tl.load(lines + columns[None, :], mask=is_value, other=0.0).to(tl.float32)
        sums += tl.sum(factors * values[:, None], 0)
    places = y + row * WIDTH + FIRST + columns
    is_changed = columns < tl.where(rank > 0, OUT, 0)
    sums += tl.load(places, mask=is_changed, other=0.0).to(tl.float32)
    tl.store(places, sums.to(y.dtype.element_ty), mask=is_changed)


@cache
def shrink_launch(inputs: int, max_rank: int, dtype: torch.dtype) -> Launch:
    """The launch of `_shrink`."""
    constants = {"IN": inputs, "MAX_RANK": max_rank, "RANKS": RANKS, "BLOCK": INPUTS}
    return Launch(_shrink, constants, (pointer(dtype), pointer(dtype), "*i32", "*i32", "*fp32"))


@cache
def expand_launch(outputs: int, width: int, first: int, max_rank: int, dtype: torch.dtype) -> Launch:
    """The launch of `_expand`."""
    sizes = {"OUT": outputs, "WIDTH": width, "FIRST": first, "MAX_RANK": max_rank}
    constants = {**sizes, "RANKS": RANKS, "BLOCK": OUTPUTS}
    return Launch(_expand, constants, ("*fp32", pointer(dtype), "*i32", "*i32", pointer(dtype)))


class DeviceSlots:
    """The adapters of the rows of the current step and their ranks, on the device.

    Attributes:
        slots: int32 [MAX_TOKENS], as in `LoraBatch.set_slots`.
    """

    def __init__(self, batch: LoraBatch, device: torch.device) -> None:
        self.slots = torch.full((MAX_TOKENS,), NO_ADAPTER, dtype=torch.int32, device=device)
        self._parts: list[tuple[LoraPart, npt.NDArray[np.int32], torch.Tensor]] = []
        batch.observe(self._update)

    def add(self, part: LoraPart) -> torch.Tensor:
        """The ranks of a part in each slot, int32 [slots], which every step updates."""
        ranks = torch.from_numpy(part.ranks.copy()).to(part.a.device)
        self._parts.append((part, part.ranks.copy(), ranks))
        return ranks

    def _update(self, slots: IntArray) -> None:
        self.slots[: len(slots)].copy_(to_device(slots.astype(np.int32), self.slots.device))
        if (slots >= 0).any():
            for part, copied, ranks in self._parts:
                if not np.array_equal(part.ranks, copied):
                    copied[:] = part.ranks
                    ranks.copy_(to_device(copied, ranks.device))


class TritonAdaptedLinear:
    """A `LinearKernel` that adds the products of adapters in two launches for each matrix."""

    def __init__(self, base: TritonLinear, layer: LoraLayer, slots: DeviceSlots) -> None:
        self._base, self._slots = base, slots
        self._parts = [(part, slots.add(part)) for part in layer.parts]
        self._width = sum(part.outputs for part in layer.parts)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = aligned(self._base.prologue(x))
        y = self._base.multiply(x, residual, out)
        target, first, slots = aligned(y), 0, self._slots.slots
        for part, ranks in self._parts:
            max_rank, inputs = part.a.shape[1:]
            inner = x.new_empty((len(x), max_rank), dtype=torch.float32)
            shrink = shrink_launch(inputs, max_rank, x.dtype)
            shrink((len(x), -(-max_rank // RANKS)), x, part.a, slots, ranks, inner)
            expand = expand_launch(part.outputs, self._width, first, max_rank, x.dtype)
            expand((len(x), -(-part.outputs // OUTPUTS)), inner, part.b, slots, ranks, target)
            first += part.outputs
        return y if target is y else y.copy_(target)


class AdapterMaker:
    """Makes the adapted layers of one model, which share the slots of a step."""

    def __init__(self) -> None:
        self._slots: dict[LoraBatch, DeviceSlots] = {}

    def add_lora(self, base: TritonLinear, layer: LoraLayer) -> TritonAdaptedLinear:
        """Implement `Kernels.add_lora`."""
        if layer.batch not in self._slots:
            self._slots[layer.batch] = DeviceSlots(layer.batch, layer.parts[0].a.device)
        return TritonAdaptedLinear(base, layer, self._slots[layer.batch])


def variants() -> Iterator[tuple[str, Launch]]:
    """The launches of adapters of Llama-3-8B."""
    yield "adapters A, rank 16", shrink_launch(4096, 16, torch.bfloat16)
    yield "adapters B, rank 16", expand_launch(4096, 6144, 0, 16, torch.bfloat16)
