"""The recurrence of a layer: a convolution and, in most of them, a state of matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from chairlift.kernels.recurrence_sizes import GatedDeltaSizes, Mamba2Sizes
from chairlift.models.declaration.matrix_spec import MatrixSpec, NormSpec, StoredRows


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A causal convolution of each channel, see `kernels.recurrence.Convolution`.

    Attributes:
        name: its parameters are `<name>.weight` [channels, 1, width] and, with `has_bias`, `<name>.bias` [channels].
        parts: the names of the weights whose rows are those of its own, one below the other; empty for one weight.
    """

    name: str
    channels: int
    width: int
    has_bias: bool = False
    parts: tuple[str, ...] = ()

    @property
    def num_values(self) -> int:
        return self.channels * (self.width + self.has_bias)

    @property
    def num_kept_values(self) -> int:
        """The number of inputs that are a part of the state."""
        return self.channels * (self.width - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec(GatedDeltaSizes):
    """The gated delta rule, see `kernels.recurrence.GatedDelta`.

    Attributes:
        name: its parameters are `<name>.A_log`, [num_heads], and `<name>.dt_bias`, [num_decays].
        norm: the norm of each head, of value_dim values.
        stored: the rows of the matrices of the input whose rows are grouped by key head in files.
    """

    name: str
    norm: NormSpec
    stored: Mapping[str, StoredRows] = field(default_factory=dict)

    @property
    def num_values(self) -> int:
        return 2 * self.num_decays


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(Mamba2Sizes):
    """Mamba-2, see `kernels.recurrence.Mamba2`.

    Attributes:
        name: its parameters are `<name>.A_log`, `<name>.dt_bias` and `<name>.D`, [num_heads].
        norm: the norm of num_heads * head_dim values, or None.
        projection_scales: the factors of z, x, B, C and dt, or empty.
    """

    name: str
    norm: NormSpec | None = None
    projection_scales: tuple[float, ...] = ()

    @property
    def num_values(self) -> int:
        return 3 * self.num_heads + (sum(self.row_parts) if self.projection_scales else 0)


@dataclass(frozen=True, slots=True)
class RecurrenceSpec:
    """A layer with recurrent state: output(recurrence(input(x))).

    Attributes:
        input: the projection to the rows of `kernels.recurrence`, with one part or several.
        gates: the projections of the last parts of the input to the first values of these rows, which the others
            follow; empty if the input has the complete rows.
        gated_delta, mamba2: how the matrices of the state are updated; both are None in a `ShortConvolution`, which has
            none.
    """

    input: MatrixSpec
    output: MatrixSpec
    convolution: ConvolutionSpec
    gated_delta: GatedDeltaSpec | None = None
    mamba2: Mamba2Spec | None = None
    gates: tuple[MatrixSpec, ...] = ()

    @property
    def matrices(self) -> tuple[MatrixSpec, ...]:
        return self.input, *self.gates, self.output

    @property
    def row_size(self) -> int:
        """The number of values of a token in the results of the projections before the recurrence."""
        return sum(matrix.out_features for matrix in (self.input, *self.gates))

    @property
    def rule(self) -> GatedDeltaSpec | Mamba2Spec | None:
        return self.gated_delta or self.mamba2

    @property
    def num_values(self) -> int:
        """The number of values of parameters, without projections and norm."""
        return self.convolution.num_values + (0 if self.rule is None else self.rule.num_values)

    @property
    def matrix_values(self) -> int:
        """The number of values in the matrices of the state of a sequence."""
        return 0 if self.rule is None else math.prod(self.rule.matrix_shape)

    @property
    def state_values(self) -> int:
        """The number of float32 values that the layer keeps for a sequence."""
        return self.convolution.num_kept_values + self.matrix_values

    @property
    def norm(self) -> NormSpec | None:
        return None if self.rule is None else self.rule.norm
