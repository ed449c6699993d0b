"""The matrices and norms of a declaration.

Names are parameter names of Hugging Face checkpoints, without `.weight` and `.bias`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

LM_HEAD: Final = "LM head"
EMBEDDING: Final = "embedding"
ATTENTION: Final = "attention"
RECURRENCE: Final = "recurrence"
MLP: Final = "MLP"
EXPERTS: Final = "experts"
ROUTER: Final = "router"
PROJECTIONS: Final = "projections"
PER_LAYER_EMBEDDING: Final = "per-layer embeddings"
PER_LAYER_INPUTS: Final = "per-layer inputs"


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm of rows of `size` values, with the parameters `<name>.weight` and, for LayerNorm, `<name>.bias`.

    Attributes:
        name: None for an RMSNorm without a parameter, whose weight is 1.
        weight_offset: the number that is added to the weight of the checkpoint: 1 for Gemma's, whose weights are
            differences from 1.
        weight_multiplier: the factor of the weight of the checkpoint.
        has_bias: whether the checkpoint of a LayerNorm has the bias; otherwise it is 0.
    """

    kind: Literal["rms_norm", "layer_norm"]
    name: str | None
    size: int
    eps: float
    weight_offset: float = 0.0
    weight_multiplier: float = 1.0
    has_bias: bool = True

    @property
    def num_values(self) -> int:
        return self.size * (2 if self.kind == "layer_norm" else 1)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The place of a matrix within a larger one of the same file.

    Attributes:
        num_rows: the number of rows of the larger matrix.
        rows: the numbers of its rows that form the matrix, in their order; a range has the step 1.
        is_transposed: whether these rows are the columns of the matrix.
    """

    num_rows: int
    rows: Sequence[int]
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """Matrices with the same input, which are multiplied as one product.

    Attributes:
        group: the heading in the memory plan: ATTENTION, RECURRENCE, MLP, EXPERTS, ROUTER, PROJECTIONS,
            PER_LAYER_EMBEDDING, PER_LAYER_INPUTS, EMBEDDING or LM_HEAD.
        kernel: the name of the product in the kernel benchmark: "qkv", "output", "gate_up", ...
        parts: (name, output features) of each matrix, in the order of the output.
        has_bias: whether every part has a bias.
    """

    group: str
    kernel: str
    parts: tuple[tuple[str, int], ...]
    in_features: int
    has_bias: bool = False

    @property
    def out_features(self) -> int:
        return sum(out for _, out in self.parts)

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of the parameters, with `.weight`."""
        return tuple(f"{name}.weight" for name, _ in self.parts)

    @property
    def keeps_format(self) -> bool:
        """Whether the matrix keeps the format of its file if all others are quantized.

        A router is small, and its rounding errors would choose other experts.
        """
        return self.group == ROUTER

    def of_expert(self, index: int) -> MatrixSpec:
        """The matrices of one expert; the names of this declaration have "{}" in place of its number."""
        return replace(self, parts=tuple((name.format(index), out) for name, out in self.parts))
