"""Layers that call nothing but the extension, called from Python once and from then on in one native call.

A decode step of a small model reads its weights in three milliseconds, and 150 calls from Python take another half. The
first step of so many rows is recorded (as CUDA graphs are captured), and steps of as many rows repeat it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from chairlift.kernels.backend import RotaryStep
from chairlift.kernels.cpu.attention import NativePlan
from chairlift.kernels.cpu.native_extension import NativeExtension
from chairlift.kernels.cpu.row_buffers import RowBuffers
from chairlift.kernels.registry import Layer, in_turn

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native

MAX_ROWS = 64
"""Of steps that are recorded: beyond, calls cost little beside what they do."""


@contextmanager
def recorded(tape: _native.Tape) -> Iterator[None]:
    """Puts what this thread calls on an empty `Tape`."""
    try:
        tape.start()
        yield
    finally:
        tape.stop()


class RecordedLayers:
    """Runs layers one after the other. All that they do must be calls of `NativeLinear` and `NativeAttention`.

    A tape holds addresses: of the layers, of `buffers`, of KV memory and of the plan's output. It is dropped when any
    of them is another.
    """

    def __init__(self, native: NativeExtension, buffers: RowBuffers) -> None:
        self._new_tape = native.Tape
        self._buffers = buffers
        self._layers: Sequence[Layer] = ()
        self._place: object = None
        self._tapes: dict[int, tuple[_native.Tape, torch.Tensor]] = {}

    def __call__(self, layers: Sequence[Layer], x: torch.Tensor, rotary: RotaryStep, plan: NativePlan) -> torch.Tensor:
        """x [T, hidden_size] of the embedding through all layers, to [T, hidden_size]."""
        num_rows = len(x)
        assert num_rows == plan.num_tokens == len(rotary.positions), "the plan is of this step"
        if num_rows > MAX_ROWS:
            return in_turn(layers, x, rotary, plan)
        self._drop_what_moved(layers, x, plan)
        if num_rows in self._tapes:
            tape, out = self._tapes[num_rows]
            tape.replay(plan.step, rotary.positions.data_ptr())
            return out
        tape = self._new_tape()
        with recorded(tape):
            out = in_turn(layers, x, rotary, plan)
        self._tapes[num_rows] = tape, out
        return out

    def _drop_what_moved(self, layers: Sequence[Layer], x: torch.Tensor, plan: NativePlan) -> None:
        place = (self._buffers.moves, plan.moves, x.data_ptr(), plan.out.data_ptr())
        if place != self._place or layers is not self._layers:
            self._tapes.clear()
            self._place, self._layers = place, layers
