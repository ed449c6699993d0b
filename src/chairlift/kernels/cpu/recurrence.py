"""Recurrences by the native kernels: everything between the input and the output projection in one call per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from chairlift.errors import ConfigError
from chairlift.kernels.attention import zeroed
from chairlift.kernels.cpu import native
from chairlift.kernels.cpu.row_buffers import RowBuffers, rows_of
from chairlift.kernels.recurrence import GatedDelta, Recurrence, RecurrentState, ShortConvolution, StateStep

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native
    from chairlift.kernels.weights import FloatArray

CONVOLUTION_WIDTHS = range(2, 8)


class NativeStates:
    """What all recurrences of a model share: the states of the current step in the form of the extension.

    Attributes:
        num_allocations: how often states were allocated, which changes when their addresses may change.
    """

    def __init__(self) -> None:
        self.num_allocations = 0
        self._last: tuple[StateStep, _native.StateStep] | None = None

    def convert(self, step: StateStep) -> _native.StateStep:
        """The step in the form of the extension, which is made when the first layer needs it.

        Raises:
            ValueError: the arrays of the step do not fit together.
        """
        if self._last is None or self._last[0] is not step:
            arrays = (step.query_start_loc, step.sources, step.slots, step.snapshots)
            self._last = step, native.StateStep(*(array.numpy() for array in arrays))
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

    def __init__(self, recurrence: Recurrence, buffers: RowBuffers, states: NativeStates) -> None:
        self._channels, self._width = recurrence.convolution.num_channels, recurrence.convolution.width
        if self._width not in CONVOLUTION_WIDTHS:
            raise ConfigError(
                f"a convolution must have a width of {CONVOLUTION_WIDTHS[0]} to {CONVOLUTION_WIDTHS[-1]} with native "
                f"kernels, got {self._width}: choose kernels=torch"
            )
        self._matrix_shape = recurrence.matrix_shape
        self._key = ("recurrence", recurrence.out_features)
        self._buffers, self._states = buffers, states
        vectors: list[FloatArray] = []
        self._kernel = _make(recurrence, vectors)
        self.num_bytes = sum(vector.nbytes for vector in vectors)

    def allocate(self, num_slots: int) -> RecurrentState:
        self._states.num_allocations += 1
        cpu = torch.device("cpu")
        tails = zeroed((num_slots, self._width - 1, self._channels), torch.float32, cpu)
        shape = self._matrix_shape
        matrix = None if shape is None else zeroed((num_slots, *shape), torch.float32, cpu)
        return RecurrentState(tails.transpose(1, 2), matrix)

    def __call__(self, projected: torch.Tensor, state: RecurrentState, step: StateStep) -> torch.Tensor:
        assert state.convolution.stride(1) == 1, "the state must come from allocate"
        native_step = self._states.convert(step)
        assert native_step.num_tokens <= len(projected), "the step must belong to these rows"
        out = self._buffers.rows(self._key, len(projected))
        self._kernel(
            *rows_of(projected),
            state.convolution.data_ptr(),
            0 if state.matrix is None else state.matrix.data_ptr(),
            len(state.convolution),
            native_step,
            *rows_of(out),
        )
        return out


def _make(recurrence: Recurrence, vectors: list[FloatArray]) -> _native.ShortConvolution | _native.MatrixRecurrence:
    """Return the kernel of a recurrence, and append the arrays that it copies to `vectors`."""

    def array(values: torch.Tensor) -> FloatArray:
        vectors.append(values.float().contiguous().numpy())
        return vectors[-1]

    def optional(values: torch.Tensor | None) -> FloatArray | None:
        return None if values is None else array(values)

    convolution = recurrence.convolution
    weight, bias = array(convolution.weight.t()), optional(convolution.bias)
    if isinstance(recurrence, ShortConvolution):
        return native.ShortConvolution(weight, bias)
    _, key_size, value_size = recurrence.matrix_shape
    own: dict[str, Any]
    if isinstance(recurrence, GatedDelta):
        own = {"key_heads": recurrence.num_key_heads, "factor_scale": recurrence.beta_scale}
        own |= {"has_tiled_keys": recurrence.has_tiled_keys, "norm_group": value_size, "gates_first": False}
        own |= {"has_channel_decay": recurrence.has_channel_decay, "has_sigmoid_gate": recurrence.gate == "sigmoid"}
        own |= {"skip": None, "low": 0.0, "high": 0.0, "row_scales": None}
    else:
        low, high = recurrence.dt_limits
        has_norm = recurrence.norm_weight is not None
        own = {"key_heads": recurrence.num_groups, "factor_scale": 1.0, "has_tiled_keys": False}
        own |= {"has_channel_decay": False, "has_sigmoid_gate": False}
        own |= {"norm_group": recurrence.norm_group_size if has_norm else value_size}
        own |= {"gates_first": not recurrence.norm_before_gate, "skip": array(recurrence.skip)}
        own |= {"low": low, "high": high, "row_scales": optional(recurrence.projection_scales)}
    return native.MatrixRecurrence(
        is_delta=isinstance(recurrence, GatedDelta),
        heads=recurrence.num_heads,
        key_size=key_size,
        value_size=value_size,
        convolution_weight=weight,
        convolution_bias=bias,
        rate=array(recurrence.decay),
        bias=array(recurrence.dt_bias),
        norm_weight=optional(recurrence.norm_weight),
        norm_eps=recurrence.norm_eps,
        **own,
    )
