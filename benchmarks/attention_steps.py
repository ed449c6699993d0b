"""Steps of attention in benchmarks: equally long sequences, with blocks in random order."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from chairlift.kernels.attention import AttentionMetadata


class AttentionCase(NamedTuple):
    """The size of an attention pass: `num_queries` are the last tokens of each sequence of `context` tokens, and the
    first `num_shared` are in the same blocks for all sequences."""

    num_seqs: int
    num_queries: int
    context: int
    num_shared: int = 0


def attention_metadata(case: AttentionCase, block_size: int) -> AttentionMetadata:
    """The metadata of a step of equally long sequences whose blocks are in random order."""
    num_seqs, num_queries, context, num_shared = case
    per_seq = -(-context // block_size)
    order = list(range(num_seqs * per_seq))
    random.Random(0).shuffle(order)
    tables = torch.tensor(order, dtype=torch.int32).view(num_seqs, per_seq)
    tables[:, : num_shared // block_size] = tables[0, : num_shared // block_size]
    positions = torch.arange(context - num_queries, context)
    slots = tables[:, positions // block_size].long() * block_size + positions % block_size
    starts = list(range(0, num_seqs * num_queries + 1, num_queries))
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.full((num_seqs,), context, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=slots.flatten(),
        query_start_loc_host=starts,
        seq_lens_host=[context] * num_seqs,
        block_size=block_size,
    )
