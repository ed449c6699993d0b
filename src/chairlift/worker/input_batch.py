"""InputBatch: the inputs of one step, gathered from request rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from chairlift.kernels.attention import AttentionMetadata
from chairlift.kernels.device_copy import to_device
from chairlift.kernels.recurrence import StateStep
from chairlift.worker.request_rows import NO_STATE, IntArray, RequestRows

NO_PADDING: Mapping[str, int] = MappingProxyType({})
NO_DRAFTS: Mapping[str, list[int]] = MappingProxyType({})
Checkpoints = Mapping[str, list[tuple[int, int]]]
"""As `SchedulerOutput.checkpoints`."""


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The T packed tokens of B requests, one request after the other, with the padding of a request before its tokens.

        request 0          request 1
        [pad pad tok tok] [tok tok tok tok] ...
                ^ token_start     ^ token_end

    Attributes:
        request_ids: the requests in batch order.
        rows: int64 [B], on the host: their rows.
        num_scheduled: int64 [B], on the host: their numbers of tokens, without padding.
        num_drafts: int64 [B], on the host: the numbers of draft tokens among them, which come last.
        token_start, token_end: int64 [B], on the host: the range of their tokens among the packed tokens.
        samples: bool [B], on the host: the step computes the request's last known token and its draft tokens, so
            tokens are sampled.
        is_padded: bool [B], on the host: the step computes padding only, for a row with computed tokens.
        is_decode: the step computes exactly the last known token of every request.
        token_ids, positions: int64 [T], on the device. Padding repeats the row's first token at position 0.
        attention: the metadata of the step for each group of layers.
        states: the recurrent states that the step reads and writes; None if the model has none.
    """

    request_ids: list[str]
    rows: IntArray
    num_scheduled: IntArray
    num_drafts: IntArray
    token_start: IntArray
    token_end: IntArray
    samples: npt.NDArray[np.bool_]
    is_padded: npt.NDArray[np.bool_]
    is_decode: bool
    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: list[AttentionMetadata]
    states: StateStep | None = None


@dataclass(frozen=True, slots=True)
class _Sequences:
    """The S sequences of packed tokens for attention; tokens and padding of a request are separate sequences.

    Attributes:
        rows, counts: int64 [S], the row and the number of packed tokens.
        first_positions: int64 [S], the position of the first token; -1 for padding.
        seq_lens: int64 [S], the number of tokens that the last token attends to.
    """

    rows: IntArray
    counts: IntArray
    first_positions: IntArray
    seq_lens: IntArray


def gather_input_batch(
    rows: RequestRows,
    num_scheduled_tokens: Mapping[str, int],
    num_padding_tokens: Mapping[str, int] = NO_PADDING,
    draft_token_ids: Mapping[str, list[int]] = NO_DRAFTS,
    checkpoints: Checkpoints | None = None,
) -> InputBatch:
    """Pack the next tokens of each request, without a loop over tokens. Each request has a token or padding.

    Draft tokens have been written to the rows.

    Args:
        checkpoints: the checkpoints that the step writes; None if the model has no recurrent layers.
    """
    request_ids = list(num_scheduled_tokens)
    batch_rows = rows.rows_of(request_ids)
    if not num_padding_tokens and max(num_scheduled_tokens.values()) == 1:
        decode = _decode_batch(rows, request_ids, batch_rows, checkpoints)
        if decode is not None:
            return decode
    counts: IntArray = np.fromiter(num_scheduled_tokens.values(), np.int64, len(request_ids))
    computed = rows.num_computed_tokens[batch_rows]
    seq_lens = computed + counts
    drafts: IntArray = np.array([len(draft_token_ids.get(request_id, ())) for request_id in request_ids])
    known = rows.num_tokens[batch_rows] + drafts
    sequences, totals = _Sequences(batch_rows, counts, computed, seq_lens), counts
    if num_padding_tokens:
        padding: IntArray = np.array([num_padding_tokens.get(request_id, 0) for request_id in request_ids])
        sequences, totals = _pad(sequences, padding), counts + padding
    assert totals.min() > 0, "a scheduled request has something to compute"
    assert (seq_lens <= known).all(), "a token is computed before it is known"
    token_end = np.cumsum(totals)
    starts, token_rows, positions, slots = _token_slots(rows, sequences)
    return InputBatch(
        request_ids=request_ids,
        rows=batch_rows,
        num_scheduled=counts,
        num_drafts=drafts,
        token_start=token_end - counts,
        token_end=token_end,
        samples=(seq_lens == known) & (counts > 0),
        is_padded=(counts == 0) & (computed > 0),
        is_decode=False,
        token_ids=rows.tokens_at(token_rows, positions),
        positions=to_device(positions, rows.device),
        attention=_attention_metadata(rows, sequences, starts, slots),
        states=_state_step(
            rows, sequences, starts, checkpoints, zip(batch_rows.tolist(), drafts.tolist(), strict=True)
        ),
    )


def _decode_batch(
    rows: RequestRows, request_ids: list[str], batch_rows: IntArray, checkpoints: Checkpoints | None
) -> InputBatch | None:
    """Pack a decode step, the most frequent kind; None if a row has more than one token to compute."""
    num_rows = len(request_ids)
    positions = rows.num_computed_tokens[batch_rows]
    seq_lens = positions + 1
    if (seq_lens != rows.num_tokens[batch_rows]).any():
        return None
    starts: IntArray = np.arange(num_rows + 1)
    no_rows = np.zeros(num_rows, dtype=np.bool_)
    tokens = _Sequences(batch_rows, np.ones_like(batch_rows), positions, seq_lens)
    return InputBatch(
        request_ids=request_ids,
        rows=batch_rows,
        num_scheduled=tokens.counts,
        num_drafts=np.zeros_like(batch_rows),
        token_start=starts[:-1],
        token_end=starts[1:],
        samples=~no_rows,
        is_padded=no_rows,
        is_decode=True,
        token_ids=rows.tokens_at(batch_rows, positions),
        positions=to_device(positions, rows.device),
        attention=_attention_metadata(rows, tokens, starts, _slots(rows, batch_rows, positions)),
        states=_state_step(rows, tokens, starts, checkpoints),
    )


def _pad(tokens: _Sequences, padding: IntArray) -> _Sequences:
    """Add the padding before each request's tokens. Padding before tokens attends to nothing. Padding of a row without
    tokens (its request is finished, or its prompt begins in a later column) attends to the row's computed tokens, as in
    a padded batch."""
    seq_lens = np.where(tokens.counts == 0, tokens.first_positions, 0)
    pairs = (
        (tokens.rows, tokens.rows),
        (padding, tokens.counts),
        (np.full_like(padding, -1), tokens.first_positions),
        (seq_lens, tokens.seq_lens),
    )
    columns = [np.stack(pair, axis=1).ravel() for pair in pairs]
    kept = columns[1] > 0
    return _Sequences(*(column[kept] for column in columns))


def _token_slots(rows: RequestRows, sequences: _Sequences) -> tuple[IntArray, IntArray, IntArray, list[IntArray]]:
    """Locate the packed tokens: int64 [S + 1] with the start of each sequence, and T at the end; then int64 [T] with
    the row, the position (0 for padding) and, for each group, the slot (-1 for padding) of each token."""
    starts: IntArray = np.zeros(len(sequences.counts) + 1, dtype=np.int64)
    np.cumsum(sequences.counts, out=starts[1:])
    is_padding = np.repeat(sequences.first_positions < 0, sequences.counts)
    positions = np.arange(starts[-1]) + np.repeat(sequences.first_positions - starts[:-1], sequences.counts)
    positions[is_padding] = 0
    token_rows = np.repeat(sequences.rows, sequences.counts)
    slots = _slots(rows, token_rows, positions)
    for group_slots in slots:
        group_slots[is_padding] = -1
    return starts, token_rows, positions, slots


def _slots(rows: RequestRows, token_rows: IntArray, positions: IntArray) -> list[IntArray]:
    """The slots that K and V are written to in each group: int64 [T]."""
    blocks, offsets = np.divmod(positions, rows.block_size)
    slots: list[IntArray] = [
        np.multiply(table[token_rows, blocks], rows.block_size, dtype=np.int64) for table in rows.block_tables
    ]
    for group_slots in slots:
        group_slots += offsets
    return slots


def _state_step(
    rows: RequestRows,
    sequences: _Sequences,
    starts: IntArray,
    checkpoints: Checkpoints | None,
    drafts: Iterable[tuple[int, int]] = (),
) -> StateStep | None:
    """The states of the sequences: padding continues the zero state and writes none.

    Args:
        drafts: the rows with their numbers of draft tokens; the state before each of these is written to the next slot
            of `RequestRows.draft_slots`.
    """
    if checkpoints is None:
        return None
    is_padding = sequences.first_positions < 0
    drafted = [(row, count) for row, count in drafts if count]
    with_snapshots = enumerate(sequences.rows.tolist()) if checkpoints or drafted else ()
    sequence_of = {row: index for index, row in with_snapshots if not is_padding[index]}
    snapshots = [
        (
            sequence := sequence_of[rows.row_of(request_id)],
            position - int(sequences.first_positions[sequence]),
            rows.first_checkpoint + slot,
        )
        for request_id, entries in checkpoints.items()
        for position, slot in entries
    ]
    before_drafts = [
        (sequence_of[row], int(sequences.counts[sequence_of[row]]) - count + index)
        for row, count in drafted
        for index in range(count)
    ]
    assert len(before_drafts) <= len(rows.draft_slots), "a step has more draft tokens than slots for their states"
    snapshots += [(*key, slot) for key, slot in zip(before_drafts, rows.draft_slots.tolist(), strict=False)]
    written: IntArray = np.array(sorted(snapshots), dtype=np.int64).reshape(-1, 3)
    sources = np.where(is_padding, NO_STATE, rows.state_sources[sequences.rows])
    slots = np.where(is_padding, NO_STATE, rows.state_slots[sequences.rows])
    return StateStep(*(to_device(each.astype(np.int32), rows.device) for each in (starts, sources, slots, written)))


def _attention_metadata(
    rows: RequestRows, sequences: _Sequences, starts: IntArray, slots: list[IntArray]
) -> list[AttentionMetadata]:
    seq_lens = sequences.seq_lens
    max_blocks = -(-int(seq_lens.max()) // rows.block_size)
    for num_blocks in rows.num_blocks:
        assert (seq_lens <= num_blocks[sequences.rows] * rows.block_size).all(), "a token is computed without a slot"
    start_loc, lengths = (to_device(each.astype(np.int32), rows.device) for each in (starts, seq_lens))
    start_loc_host, lengths_host = starts.tolist(), seq_lens.tolist()
    return [
        AttentionMetadata(
            query_start_loc=start_loc,
            seq_lens=lengths,
            block_tables=to_device(table[sequences.rows, :max_blocks], rows.device),
            slot_mapping=to_device(group_slots, rows.device),
            query_start_loc_host=start_loc_host,
            seq_lens_host=lengths_host,
            block_size=rows.block_size,
        )
        for table, group_slots in zip(rows.block_tables, slots, strict=True)
    ]
