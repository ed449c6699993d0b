"""The number of vector instructions of a linear kernel for each weight.

It is counted from the loops of `kernels/cpu/csrc/linear_products.inl`. One iteration of a loop multiplies a group of 32
inputs of a tile by a block of up to R rows. A tile has S stripes, each of which is a vector of outputs. With AVX-512
and VNNI, one iteration needs, by format:

| | q4_0, q4_1 | q8_0 | int8 | bf16, f16, f32 |
|---|---|---|---|---|
| dot | 8 R S dot products | the same | the same | 32 R S fma |
| broadcast | 8 R, of four activations | the same | the same | 32 R |
| unpack | 12 S: two ands and a shift for 4 loads | 8 S loads | 8 S loads | 32 S loads; bf16: 48 S |
| epilogue | R S of first values, converted, scaled, fma | the same | once for all inputs: not counted | none |

bf16 has a load, a shift and an and for each pair of inputs. The epilogue loads S scales of weights and R scales of
activations. It also loads R first values; q4_1 has S minimums, R sums and R S fma instead. A dot product is one
instruction with VNNI and three without (maddubs, madd, add). Without VNNI weights of eight bits need six, because they
are split in two, and three to split them. Moves between registers and spills, which depend on the compiler, and the
fma of each outlier are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.kernels.cpu.formats import FLOATS, GROUP

BLOCK_ROWS: Final = 4
"""Maximum number of rows that a loop multiplies."""


@dataclass(frozen=True, slots=True)
class VectorSet:
    """The properties of an instruction set, and the tile that its loops multiply."""

    lanes: int
    tile_stripes: int
    has_vnni: bool


SETS: Final = {
    "avx512-vnni": VectorSet(16, 3, True),
    "avx512": VectorSet(16, 3, False),
    "avx-vnni": VectorSet(8, 1, True),
    "avx2": VectorSet(8, 1, False),
}
"""Instruction sets by the name in the extension. The instructions of "portable" depend on the compiler."""


@dataclass(frozen=True, slots=True)
class InstructionCount:
    """The number of vector instructions for 32 weights and one row, with blocks of `rows` rows."""

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
    """Count the instructions for each size of block that these numbers of rows fill.

    Returns:
        An empty list for an instruction set that is not in SETS.
    """
    vectors = SETS.get(isa)
    if vectors is None:
        return []
    blocks = sorted({min(count, BLOCK_ROWS) for count in rows})
    return [_count(vectors, weight_format, block) for block in blocks]


def _count(vectors: VectorSet, weight_format: str, rows: int) -> InstructionCount:
    """Divide the instructions of one iteration by its groups of 32 weights and its rows."""
    stripes, num_quads = vectors.tile_stripes, GROUP // 4
    products = rows * stripes
    if weight_format in FLOATS:
        dot, broadcast, epilogue = GROUP * products, GROUP * rows, 0.0
        unpack = GROUP * stripes * (1.5 if weight_format == "bf16" else 1)
    else:
        has_nibbles = weight_format.startswith("q4")
        dot_instructions, cut = (1, 0) if vectors.has_vnni else (3, 0) if has_nibbles else (6, 3)
        dot, broadcast = num_quads * dot_instructions * products, num_quads * rows
        unpack = 12 * stripes if has_nibbles else num_quads * stripes * (1 + cut)
        epilogue = _epilogue(weight_format, rows, stripes)
    share = vectors.lanes * stripes * rows
    return InstructionCount(weight_format, rows, dot / share, broadcast / share, unpack / share, epilogue / share)


def _epilogue(weight_format: str, rows: int, stripes: int) -> float:
    sums = rows * stripes
    if weight_format == "int8":
        return 0
    if weight_format == "q4_1":
        return 5 * sums + 2 * stripes + 2 * rows
    return 4 * sums + stripes + 2 * rows
