"""DeltaSizes: the sizes of layers with the gated delta rule (Yang et al., 2024), and their declaration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from chairlift.kernels.recurrence_sizes import GatedDeltaSizes, sizes_of
from chairlift.models.declaration.matrix_spec import RECURRENCE, MatrixSpec, NormSpec, StoredRows
from chairlift.models.declaration.recurrence_spec import ConvolutionSpec, GatedDeltaSpec, RecurrenceSpec
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields, exact_quotient
from chairlift.models.reading.layer_fields import read_width
from chairlift.models.reading.llama_sizes import LlamaSizes

Parts = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes(GatedDeltaSizes):
    """The sizes of the layers with the gated delta rule.

    Attributes:
        width: the width of the convolution.
    """

    width: int

    def declare(
        self,
        prefix: str,
        hidden_size: int,
        norm: NormSpec,
        inputs: Parts,
        output: str,
        *,
        convolutions: Sequence[str] = (),
        gates: Parts = (),
        grouped_rows: tuple[tuple[str, tuple[int, ...]], ...] = (),
    ) -> RecurrenceSpec:
        """Return the declaration of one layer, whose parameters begin with `prefix`, as do these names.

        Args:
            inputs: the names and widths of the matrices of the input.
            convolutions: the names of the weights that make up the convolution.
            norm: see GatedDeltaSpec.
            gates: the names of the matrices of `RecurrenceSpec.gates`, and the widths of their inputs.
            grouped_rows: the names of the matrices of the input whose rows are grouped by key head in files, and the
                numbers of consecutive rows of each kind in a group.
        """

        def parts(named: Parts) -> tuple[tuple[str, int], ...]:
            return tuple((f"{prefix}.{name}", size) for name, size in named)

        stored = {f"{prefix}.{name}": ungrouped_rows(self.num_key_heads, counts) for name, counts in grouped_rows}
        return RecurrenceSpec(
            input=MatrixSpec(RECURRENCE, "delta_in", parts(inputs), hidden_size),
            output=MatrixSpec(RECURRENCE, "delta_out", parts([(output, hidden_size)]), self.out_features),
            convolution=ConvolutionSpec(
                f"{prefix}.conv1d",
                self.num_channels,
                self.width,
                parts=tuple(f"{prefix}.{name}" for name in convolutions),
            ),
            gated_delta=GatedDeltaSpec(name=prefix, norm=norm, stored=stored, **sizes_of(GatedDeltaSizes, self)),
            gates=tuple(
                MatrixSpec(RECURRENCE, "delta_gate", ((name, out),), rank)
                for (name, rank), out in zip(parts(gates), self.row_parts.values(), strict=False)
            ),
        )


def ungrouped_rows(num_groups: int, sizes: Sequence[int]) -> StoredRows:
    """Return the rows that are in equal groups, in the order of their kinds.

    Args:
        sizes: the number of consecutive rows of each kind in a group.
    """
    size, firsts = sum(sizes), accumulate(sizes, initial=0)
    rows = [
        group * size + first + row
        for first, count in zip(firsts, sizes, strict=False)
        for group in range(num_groups)
        for row in range(count)
    ]
    return StoredRows(num_groups * size, rows)


def read_delta_sizes(fields: ConfigFields, defaults: LlamaSizes | None = None, beta_scale: float = 1.0) -> DeltaSizes:
    """Read the fields of a `config.json`, whose names begin with `linear_`.

    Args:
        defaults: the sizes from which OLMo Hybrid derives those that the file does not contain; None for none.
    """
    num_heads = REQUIRED if defaults is None else defaults.num_heads
    key_heads = fields.integer("linear_num_key_heads", num_heads)
    heads = fields.integer("linear_num_value_heads", num_heads)
    exact_quotient(fields, "linear_num_value_heads", heads, "linear_num_key_heads", key_heads)
    key_dim = REQUIRED if defaults is None else int(0.75 * defaults.hidden_size / key_heads)
    key_dim = fields.integer("linear_key_head_dim", key_dim)
    return DeltaSizes(
        num_key_heads=key_heads,
        num_heads=heads,
        key_dim=key_dim,
        value_dim=fields.integer("linear_value_head_dim", REQUIRED if defaults is None else 2 * key_dim),
        beta_scale=beta_scale,
        width=read_width(fields, "linear_conv_kernel_dim", 4),
    )
