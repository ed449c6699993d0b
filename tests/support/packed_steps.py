"""Steps for tests of kernels and models: sequences with shuffled block tables, packed into AttentionMetadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from chairlift.kernels.attention import AttentionMetadata


@dataclass
class Tables:
    """Hands out blocks in random order, so that no table is consecutive but by chance."""

    num_blocks: int
    block_size: int
    seed: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self._free = torch.randperm(self.num_blocks, generator=generator).tolist()

    def grow(self, sequence: int, num_tokens: int) -> list[int]:
        """The block table of `sequence`, long enough for `num_tokens`."""
        table = self.tables.setdefault(sequence, [])
        while len(table) * self.block_size < num_tokens:
            table.append(self._free.pop())
        return table

    def slots(self, sequence: int, start: int, stop: int) -> list[int]:
        table, size = self.tables[sequence], self.block_size
        return [table[p // size] * size + p % size for p in range(start, stop)]


@dataclass(frozen=True)
class Step:
    metadata: AttentionMetadata
    positions: torch.Tensor


def pack(tables: Tables, work: Sequence[tuple[int, int, int]], num_padding: int = 0) -> Step:
    """One step.

    Args:
        work: (sequence, start, stop): the tokens that the step computes.
        num_padding: rows with slot -1 put in front of the first sequence, before its position 0.
    """
    starts, slots, positions, rows = [0], [-1] * num_padding, [0] * num_padding, []
    for sequence, start, stop in work:
        rows.append(list(tables.grow(sequence, stop)))
        slots += tables.slots(sequence, start, stop)
        positions += range(start, stop)
        starts.append(len(slots))
    width = max(map(len, rows))
    seq_lens = [stop for _, _, stop in work]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        query_start_loc_host=starts,
        seq_lens_host=seq_lens,
        block_size=tables.block_size,
    )
    return Step(metadata, torch.tensor(positions))
