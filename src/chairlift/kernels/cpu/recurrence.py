"""Recurrences by the native kernels: everything between the input and the output projection in one call per layer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from chairlift.errors import ConfigError
from chairlift.kernels.attention import zeroed
from chairlift.kernels.cpu.native_extension import NativeExtension
from chairlift.kernels.recurrence import GatedDelta, Mamba2, Recurrence, RecurrentState, ShortConvolution, StateStep
from chairlift.kernels.row_buffers import RowBuffers, StepMemory

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native
    from chairlift.kernels.weights import FloatArray

CONVOLUTION_WIDTHS = range(2, 5)


class NativeStates(StepMemory):
    """What all recurrences of a model share: the states of the current step in the form of the extension.

    Attributes:
        num_allocations: how often states were allocated, which changes when their addresses may change.
    """

    def __init__(self, native: NativeExtension) -> None:
        self.num_allocations = 0
        self._native = native
        self._last: tuple[StateStep, _native.StateStep] | None = None

    def convert(self, step: StateStep) -> _native.StateStep:
        """The step in the form of the extension, which is made when the first layer needs it.

        Raises:
            ValueError: the arrays of the step do not fit together.
        """
        if self._last is None or self._last[0] is not step:
            arrays = (step.query_start_loc, step.sources, step.slots, step.snapshots)
            self._last = step, self._native.StateStep(*(array.numpy() for array in arrays))
        return self._last[1]


class NativeRecurrence:
    """A `RecurrentKernel` in one native call.

    A sequence's results and states have the same bits in any batch, for any division into steps and any number of
    threads. The inputs of a token for the convolution are contiguous in memory.

    Attributes:
        num_bytes: the size of the parameters, which the extension copies.

    Raises:
        ConfigError: the kernels do not support the width of the convolution.
    """

    def __init__(
        self, native: NativeExtension, recurrence: Recurrence, buffers: RowBuffers, states: NativeStates
    ) -> None:
        self._channels, self._width = recurrence.convolution.num_channels, recurrence.convolution.width
        if self._width not in CONVOLUTION_WIDTHS:
            raise ConfigError(
                f"a convolution must have a width of {CONVOLUTION_WIDTHS[0]} to {CONVOLUTION_WIDTHS[-1]} with native "
                f"kernels, got {self._width}: choose kernels=torch"
            )
        self._matrix_shape = recurrence.matrix_shape
        self._key = ("recurrence", recurrence.out_features)
        self._buffers, self._states = buffers, states
        vectors = _Vectors()
        self._kernel = _make(native, recurrence, vectors)
        self.num_bytes = vectors.num_bytes

    def allocate(self, num_slots: int) -> RecurrentState:
        self._states.num_allocations += 1
        cpu = torch.device("cpu")
        tails = zeroed((num_slots, self._width - 1, self._channels), torch.float32, cpu)
        shape = self._matrix_shape
        matrix = None if shape is None else zeroed((num_slots, *shape), torch.float32, cpu)
        return RecurrentState(tails.transpose(1, 2), matrix)

    def __call__(self, projected: torch.Tensor, state: RecurrentState, step: StateStep) -> torch.Tensor:
        assert projected.dtype == torch.float32, "native kernels compute in float32"
        assert projected.stride(1) == 1, "each row must be contiguous"
        assert state.convolution.stride(1) == 1, "the state must come from allocate"
        native_step = self._states.convert(step)
        assert native_step.num_tokens <= len(projected), "the step must belong to these rows"
        out = self._buffers.rows(self._key, len(projected))
        self._kernel(
            projected.data_ptr(),
            projected.stride(0),
            state.convolution.data_ptr(),
            0 if state.matrix is None else state.matrix.data_ptr(),
            len(state.convolution),
            native_step,
            out.data_ptr(),
            out.stride(0),
        )
        return out


class _Vectors:
    """Converts parameters to arrays, and adds up their sizes."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def array(self, values: torch.Tensor) -> FloatArray:
        array: FloatArray = values.float().contiguous().numpy()
        self.num_bytes += array.nbytes
        return array

    def optional(self, values: torch.Tensor | None) -> FloatArray | None:
        return None if values is None else self.array(values)


def _make(
    native: NativeExtension, recurrence: Recurrence, vectors: _Vectors
) -> _native.ShortConvolution | _native.MatrixRecurrence:
    convolution = recurrence.convolution
    weight, bias = vectors.array(convolution.weight.t()), vectors.optional(convolution.bias)
    if isinstance(recurrence, ShortConvolution):
        return native.ShortConvolution(weight, bias)
    make = partial(
        native.MatrixRecurrence,
        heads=recurrence.num_heads,
        convolution_weight=weight,
        convolution_bias=bias,
        rate=vectors.array(recurrence.decay),
        bias=vectors.array(recurrence.dt_bias),
        norm_weight=vectors.optional(recurrence.norm_weight),
        norm_eps=recurrence.norm_eps,
    )
    return _gated_delta(make, recurrence) if isinstance(recurrence, GatedDelta) else _mamba2(make, recurrence, vectors)


def _gated_delta(make: partial[_native.MatrixRecurrence], rule: GatedDelta) -> _native.MatrixRecurrence:
    return make(
        is_delta=True,
        key_heads=rule.num_key_heads,
        key_size=rule.key_dim,
        value_size=rule.value_dim,
        has_tiled_keys=rule.has_tiled_keys,
        skip=None,
        factor_scale=rule.beta_scale,
        low=0.0,
        high=0.0,
        norm_group=rule.value_dim,
        gates_first=False,
        row_scales=None,
    )


def _mamba2(make: partial[_native.MatrixRecurrence], rule: Mamba2, vectors: _Vectors) -> _native.MatrixRecurrence:
    low, high = rule.dt_limits
    return make(
        is_delta=False,
        key_heads=rule.num_groups,
        key_size=rule.state_size,
        value_size=rule.head_dim,
        has_tiled_keys=False,
        skip=vectors.array(rule.skip),
        factor_scale=1.0,
        low=low,
        high=high,
        norm_group=rule.head_dim if rule.norm_weight is None else rule.norm_group_size,
        gates_first=not rule.norm_before_gate,
        row_scales=vectors.optional(rule.projection_scales),
    )
