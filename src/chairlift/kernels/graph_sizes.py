"""The numbers of rows of the CUDA graphs of decode steps, without torch, because the memory plan needs them."""

from __future__ import annotations

from typing import Final

ROWS_STEP: Final = 16
"""The distance of the numbers of rows above 8: products compute 16 rows in the time of one."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of rows, ascending; the last one is `max_num_seqs`."""
    sizes = [1, 2, 4, 8, *range(ROWS_STEP, max_num_seqs, ROWS_STEP)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]
