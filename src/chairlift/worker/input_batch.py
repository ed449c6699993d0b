"""The inputs of one step, gathered from request rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from chairlift.kernels.attention import AttentionMetadata
from chairlift.worker.rows import IntArray, RequestRows
from chairlift.worker.transfer import to_device


@dataclass(frozen=True, slots=True)
class InputBatch:
    """B requests and their T scheduled tokens, packed one request after the other.

    Attributes:
        request_ids: in batch order.
        rows: int64 [B], on the host.
        num_scheduled: int64 [B], on the host.
        query_start: int64 [B + 1], on the host: request i owns the packed tokens query_start[i]:query_start[i+1].
        samples: bool [B], on the host: the request's last known token is among its scheduled ones.
        token_ids, positions: int64 [T], on the device.
        attention: the shape of the step, for the attention backend.
    """

    request_ids: list[str]
    rows: IntArray
    num_scheduled: IntArray
    query_start: IntArray
    samples: npt.NDArray[np.bool_]
    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata


def gather_input_batch(rows: RequestRows, num_scheduled_tokens: Mapping[str, int]) -> InputBatch:
    """Pack the next `n` tokens of each request, for a step with at least one; no loop over tokens."""
    request_ids = list(num_scheduled_tokens)
    batch_rows = rows.rows_of(request_ids)
    counts: IntArray = np.fromiter(num_scheduled_tokens.values(), np.int64, len(request_ids))
    computed = rows.num_computed_tokens[batch_rows]
    seq_lens = computed + counts
    known = rows.num_tokens[batch_rows]
    assert counts.min() > 0, "a scheduled request has a token to compute"
    assert (seq_lens <= known).all(), "a token is computed before it is known"
    query_start: IntArray = np.zeros(len(request_ids) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])

    positions = np.arange(query_start[-1]) + np.repeat(computed - query_start[:-1], counts)
    token_rows = np.repeat(batch_rows, counts)
    token_index = to_device(token_rows * rows.max_model_len + positions, rows.device)
    return InputBatch(
        request_ids=request_ids,
        rows=batch_rows,
        num_scheduled=counts,
        query_start=query_start,
        samples=seq_lens == known,
        token_ids=rows.token_ids.view(-1)[token_index].long(),
        positions=to_device(positions, rows.device),
        attention=_attention_metadata(rows, batch_rows, query_start, seq_lens, token_rows, positions),
    )


def _attention_metadata(
    rows: RequestRows,
    batch_rows: IntArray,
    query_start: IntArray,
    seq_lens: IntArray,
    token_rows: IntArray,
    positions: IntArray,
) -> AttentionMetadata:
    block_size = rows.block_size
    max_blocks = -(-int(seq_lens.max()) // block_size)
    assert (seq_lens <= rows.num_blocks[batch_rows] * block_size).all(), "a token is computed without a slot"
    blocks, offsets = np.divmod(positions, block_size)
    slots = rows.block_tables[token_rows, blocks].astype(np.int64) * block_size + offsets
    return AttentionMetadata(
        query_start_loc=to_device(query_start.astype(np.int32), rows.device),
        seq_lens=to_device(seq_lens.astype(np.int32), rows.device),
        block_tables=to_device(rows.block_tables[batch_rows, :max_blocks], rows.device),
        slot_mapping=to_device(slots, rows.device),
        query_start_loc_host=query_start.tolist(),
        seq_lens_host=seq_lens.tolist(),
        block_size=block_size,
    )
