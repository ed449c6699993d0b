"""How many vector instructions a linear kernel spends on a weight.

Counted from the loops of `kernels/cpu/csrc/linear_tiles.inl`: in one turn a loop takes a group of 32 inputs of as many
outputs as a vector has lanes, for up to a block of rows (R). By instruction set and format, what one turn needs:

| | q4_0, q4_1 | q8_0 | int8 | bf16, f16, f32 |
|---|---|---|---|---|
| dot | 8 R dot products | the same | the same | 32 R fma |
| broadcast | 8 R, of four activations | the same | the same | 32 R; none in AVX-512, where fma does it |
| unpack | 12: two ands and a shift for 4 loads | 8 loads | 8 loads | 32 loads; bf16: and 32 shifts |
| epilogue | first values R, convert R, scale R, fma R, 1 scale | the same | no scales | none |

A dot product is one instruction with VNNI, and three without (maddubs, madd, add); of weights with eight bits six, as
they are cut in two, and three more to cut them. q4_1 adds R fma and 1 load for the minimums. Up to four rows use two
chains of sums, which takes R additions and R first values more. Moves between registers are not counted: they differ by
compiler. Outliers come on top, one fma each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.kernels.cpu.formats import FLOATS, GROUP


@dataclass(frozen=True, slots=True)
class VectorSet:
    """An instruction set. `fma_broadcasts`: an fma takes one number from memory for all lanes."""

    lanes: int
    block_rows: int
    has_vnni: bool
    fma_broadcasts: bool


SETS: Final = {
    "avx512-vnni": VectorSet(16, 8, True, True),
    "avx512": VectorSet(16, 8, False, True),
    "avx-vnni": VectorSet(8, 4, True, False),
    "avx2": VectorSet(8, 4, False, False),
}
"""By the name that the extension gives; what becomes of "portable" is up to the compiler."""

FEW_ROWS: Final = 4
"""Up to which a second chain of sums is used."""


@dataclass(frozen=True, slots=True)
class InstructionCount:
    """Vector instructions for 32 weights and a row, where a block has `rows` rows."""

    format: str
    rows: int
    dot: float
    broadcast: float
    unpack: float
    epilogue: float

    @property
    def total(self) -> float:
        return self.dot + self.broadcast + self.unpack + self.epilogue


def instruction_counts(isa: str, weight_format: str, rows: Sequence[int]) -> list[InstructionCount]:
    """Of each size of a block that these numbers of rows fill; none for an instruction set that is not in SETS."""
    vectors = SETS.get(isa)
    if vectors is None:
        return []
    blocks = sorted({min(count, vectors.block_rows) for count in rows})
    count = _floats if weight_format in FLOATS else _integers
    return [count(vectors, weight_format, block) for block in blocks]


def _floats(vectors: VectorSet, weight_format: str, rows: int) -> InstructionCount:
    share = vectors.lanes * rows
    broadcast = 0 if vectors.fma_broadcasts else GROUP * rows
    unpack = GROUP * (2 if weight_format == "bf16" else 1)
    return InstructionCount(weight_format, rows, GROUP * rows / share, broadcast / share, unpack / share, 0.0)


def _integers(vectors: VectorSet, weight_format: str, rows: int) -> InstructionCount:
    share = vectors.lanes * rows
    has_nibbles, is_grouped = weight_format.startswith("q4"), weight_format != "int8"
    num_dots = GROUP // 4
    dot, cut = 1, 0
    if not vectors.has_vnni:
        dot, cut = (3, 0) if has_nibbles else (6, 3)
    unpack = 12 if has_nibbles else num_dots * (1 + cut)
    per_row = 4 if is_grouped else 3
    if not vectors.fma_broadcasts:
        per_row += 1
    if rows <= FEW_ROWS:
        per_row += 2
    shared = 1 if is_grouped else 0
    if weight_format == "q4_1":
        per_row, shared = per_row + (1 if vectors.fma_broadcasts else 2), shared + 1
    epilogue = per_row * rows + shared
    return InstructionCount(
        weight_format, rows, num_dots * dot * rows / share, num_dots * rows / share, unpack / share, epilogue / share
    )
