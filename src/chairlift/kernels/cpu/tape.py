"""Recording of the native calls of a step, so that later steps repeat them in one call.

The 150 calls from Python of a decode step of a small model take 0.5 ms, where reading the weights takes 3 ms. The first
step with a given number of rows is recorded, like the capture of a CUDA graph, and later steps with the same number of
rows repeat the recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from chairlift.kernels.attention import StepContext
from chairlift.kernels.cpu import native
from chairlift.kernels.cpu.attention import NativeAttentionPlan
from chairlift.kernels.cpu.recurrence import NativeStates
from chairlift.kernels.cpu.row_buffers import RowBuffers
from chairlift.kernels.interface import Layer, run_in_order

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native

MAX_ROWS = 64
"""The maximum number of rows of recorded steps. In larger steps the time of calls is a small share."""


@contextmanager
def record_calls(tape: _native.Tape, steps: Sequence[_native.AttentionStep] = ()) -> Iterator[None]:
    """Record the native calls of this thread on an empty `Tape`.

    Args:
        steps: the steps of the plans that attention uses.
    """
    try:
        tape.start(list(steps))
        yield
    finally:
        tape.stop()


class RecordedLayers:
    """Runs layers one after the other, and repeats recordings where possible.

    Layers may call only `NativeLinear`, `NativeMixture`, `NativeResidualSum`, `NativeRecurrence`, `NativeAttention` and
    `native_gate`.
    A tape contains addresses of the layers, `buffers`, KV memory, states, the per-layer inputs and the outputs
    of the plans, so all tapes are dropped when one of them changes.
    """

    def __init__(self, buffers: RowBuffers, states: NativeStates) -> None:
        self._buffers = buffers
        self._states = states
        self._layers: Sequence[Layer] = ()
        self._addresses: object = None
        self._tapes: dict[int, tuple[_native.Tape, torch.Tensor]] = {}

    def __call__(self, layers: Sequence[Layer], x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Compute all layers: x [T, hidden_size] of the embedding -> [T, hidden_size]."""
        plans: tuple[NativeAttentionPlan, ...] = step.plans
        num_rows = len(x)
        for plan in plans:
            assert num_rows == plan.num_tokens == len(step.positions), "the plan must belong to this step"
        if num_rows > MAX_ROWS:
            return run_in_order(layers, x, step)
        self._drop_stale_tapes(layers, x, step)
        steps = [plan.step for plan in plans]
        if num_rows in self._tapes:
            tape, out = self._tapes[num_rows]
            states = () if step.states is None else (self._states.convert(step.states),)
            tape.replay(steps, step.positions.data_ptr(), *states)
            return out
        tape = native.Tape()
        with record_calls(tape, steps):
            out = run_in_order(layers, x, step)
        self._tapes[num_rows] = tape, out
        return out

    def _drop_stale_tapes(self, layers: Sequence[Layer], x: torch.Tensor, step: StepContext) -> None:
        addresses = (
            self._buffers.num_allocations,
            self._states.num_allocations,
            x.data_ptr(),
            None if step.per_layer_inputs is None else step.per_layer_inputs.data_ptr(),
            *((plan.kv_allocations, plan.out.data_ptr()) for plan in step.plans),
        )
        if addresses != self._addresses or layers is not self._layers:
            self._tapes.clear()
            self._addresses, self._layers = addresses, layers
