"""RequestRows: the tokens, block tables and progress of running requests, in preallocated arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from chairlift.kernels.device_copy import to_device
from chairlift.kernels.lora import NO_ADAPTER
from chairlift.outputs import NewRequest

IntArray = npt.NDArray[np.int64]

NO_STATE: Final = -1
"""The source of a sequence that continues the zero state."""


class RequestRows:
    """The tokens, block tables and progress of up to `max_num_seqs` requests, one row for each request.

        token_ids[row]     0 ........ num_computed ........ num_tokens ........ max_model_len
                           |-- K, V in memory --|-- to be computed --|-- undefined --|
        block_tables[group][row]
                           0 ........ num_blocks ........ max_blocks_per_seq
                           |-- held ----|-- stale, but valid block ids --|

    Blocks that left the window of a group stay in its table, as stale ids that no query reads.

    In a model with recurrent layers `state_slots` are the slots with the states of the rows, and `draft_slots` those
    for the states before the draft tokens of a step. They exchange slots where a draft token is rejected, so that no
    state is copied. The slots of checkpoints follow. `state_sources` are the slots that the next step continues: at
    first a checkpoint or NO_STATE.

    A request keeps its row until it is removed; a preempted request is removed and added again. Token ids are stored on
    the device only: a token is appended there when it is sampled, so the step that reads it does not wait for the host.
    All other arrays are numpy arrays on the host. On the CPU numpy also handles the token ids, because its small
    operations are several times faster than torch's.

    Args:
        max_num_seqs: number of rows.
        max_model_len: maximum number of prompt and output tokens in a row.
        block_size: slots in each block.
        device: the device of the token ids.
        num_groups: number of groups of layers, each of which has a block table in each row.
        num_draft_states: the number of draft tokens in a step whose states are kept until they are verified.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        num_draft_states: int = 0,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.max_blocks_per_seq = -(-max_model_len // block_size)
        self.device = device
        self.token_ids = torch.zeros((max_num_seqs, max_model_len), dtype=torch.int32, device=device)
        self._host_token_ids = self.token_ids.view(-1).numpy() if device.type == "cpu" else None
        size = (max_num_seqs, self.max_blocks_per_seq)
        self.block_tables = [np.zeros(size, dtype=np.int32) for _ in range(num_groups)]
        self.num_blocks: list[IntArray] = [np.zeros(max_num_seqs, dtype=np.int64) for _ in range(num_groups)]
        self.num_prompt_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int64)
        self.lora_slots: IntArray = np.full(max_num_seqs, NO_ADAPTER, dtype=np.int64)
        self.first_checkpoint = max_num_seqs + num_draft_states
        self.state_sources: IntArray = np.full(max_num_seqs, NO_STATE, dtype=np.int64)
        self.state_slots: IntArray = np.arange(max_num_seqs)
        self.draft_slots: IntArray = np.arange(max_num_seqs, self.first_checkpoint)
        self._row_of: dict[str, int] = {}
        self._last_rows: tuple[list[str], IntArray] = ([], np.zeros(0, dtype=np.int64))
        self._free_rows = list(reversed(range(max_num_seqs)))

    def row_of(self, request_id: str) -> int:
        return self._row_of[request_id]

    def rows_of(self, request_ids: list[str]) -> IntArray:
        """The rows of the requests, int64 [B], in the given order. The array is cached, so it must not be changed."""
        last_ids, rows = self._last_rows
        if request_ids != last_ids:
            rows = np.array([self._row_of[request_id] for request_id in request_ids], dtype=np.int64)
            self._last_rows = (request_ids, rows)
        return rows

    def tokens_at(self, rows: IntArray, positions: IntArray) -> torch.Tensor:
        """The tokens at these positions; int64, on the device."""
        index = rows * self.max_model_len + positions
        if self._host_token_ids is not None:
            return torch.from_numpy(self._host_token_ids[index].astype(np.int64))
        return self.token_ids.view(-1)[to_device(index, self.device)].long()

    def tokens_from(self, rows: Sequence[int], starts: Sequence[int]) -> list[list[int]]:
        """The known tokens of each row from a position on, as lists; the host waits for the device."""
        begins = [row * self.max_model_len + start for row, start in zip(rows, starts, strict=True)]
        ends = [row * self.max_model_len + int(self.num_tokens[row]) for row in rows]
        spans = list(zip(begins, ends, strict=True))
        if self._host_token_ids is not None:
            return [self._host_token_ids[begin:end].tolist() for begin, end in spans]
        tokens = self.token_ids.view(-1)
        pieces = [tokens[begin:end] for begin, end in spans]
        found = iter(torch.cat(pieces).tolist() if pieces else ())
        return [list(islice(found, len(piece))) for piece in pieces]

    def add(self, new: NewRequest) -> int:
        """Assign a free row to the request and fill it; returns the row."""
        num_tokens = len(new.token_ids)
        assert new.request_id not in self._row_of, f"{new.request_id} already has a row"
        assert 0 <= new.num_computed_tokens < num_tokens <= self.max_model_len, "a new request has a token to compute"
        row = self._free_rows.pop()
        self._last_rows = ([], self._last_rows[1][:0])
        self._row_of[new.request_id] = row
        self.token_ids[row, :num_tokens] = to_device(np.array(new.token_ids, dtype=np.int32), self.device)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.state_sources[row] = NO_STATE if new.checkpoint is None else self.first_checkpoint + new.checkpoint
        for num_blocks in self.num_blocks:
            num_blocks[row] = 0
        self.append_blocks(row, [[max(0, block_id) for block_id in block_ids] for block_ids in new.block_ids])
        return row

    def remove(self, request_id: str) -> int:
        """Remove the request and free its row; returns the row."""
        row = self._row_of.pop(request_id)
        self._free_rows.append(row)
        return row

    def move_beams(self, beams: Mapping[str, tuple[str, int]]) -> None:
        """Let beams continue the sequences of others with as many tokens; see `SchedulerOutput.beams`."""
        for request_id, (parent_id, token_id) in beams.items():
            row, parent = self._row_of[request_id], self._row_of[parent_id]
            if row != parent:
                self.token_ids[row] = self.token_ids[parent]
                num_shared = int(self.num_computed_tokens[parent]) // self.block_size
                for table in self.block_tables:
                    table[row, :num_shared] = table[parent, :num_shared]
            self.token_ids[row, int(self.num_tokens[row]) - 1] = token_id

    def append_blocks(self, row: int, added: Sequence[Sequence[int]]) -> None:
        """Extend the block table of each group.

        Blocks of a reservation beyond `max_model_len` are dropped, because they are unused.
        """
        for table, num_blocks, block_ids in zip(self.block_tables, self.num_blocks, added, strict=True):
            start = int(num_blocks[row])
            end = min(start + len(block_ids), self.max_blocks_per_seq)
            table[row, start:end] = block_ids[: end - start]
            num_blocks[row] = end

    def write_drafts(self, row: int, token_ids: Sequence[int]) -> None:
        """Write draft tokens after the known tokens, which do not become known by it."""
        start = int(self.num_tokens[row])
        end = start + len(token_ids)
        assert end < self.max_model_len, "a row has no room for the token after its draft tokens"
        if self._host_token_ids is not None:
            base = row * self.max_model_len
            self._host_token_ids[base + start : base + end] = token_ids
        else:
            self.token_ids[row, start:end] = to_device(np.array(token_ids, dtype=np.int32), self.device)

    def advance(self, rows: IntArray, num_computed: IntArray) -> None:
        """Record that `num_computed[i]` more tokens of row `rows[i]` have K and V in memory."""
        self.num_computed_tokens[rows] += num_computed
        computed = rows[num_computed > 0]
        self.state_sources[computed] = self.state_slots[computed]

    def swap_states(self, rows: IntArray, index: IntArray) -> None:
        """Exchange the slots of the rows with those at `index` of `draft_slots`."""
        self.state_slots[rows], self.draft_slots[index] = self.draft_slots[index], self.state_slots[rows]

    def keep_states(self, rows: IntArray, num_drafts: IntArray, num_accepted: IntArray) -> None:
        """Let each row continue the state after its accepted draft tokens.

        The slot of a row has the state after all draft tokens, and `draft_slots` have those before each of them, one
        row after the other.
        """
        index = np.cumsum(num_drafts) - num_drafts + num_accepted
        with_rejected = num_accepted < num_drafts
        rows = rows[with_rejected]
        self.swap_states(rows, index[with_rejected])
        self.state_sources[rows] = self.state_slots[rows]

    def append_sampled(self, rows: IntArray, token_ids: torch.Tensor) -> None:
        """Append one token to each row on the device; token_ids is int64 [len(rows)]."""
        positions = self.num_tokens[rows]
        assert int(positions.max()) < self.max_model_len, "a row has no room for another token"
        index = rows * self.max_model_len + positions
        if self._host_token_ids is not None:
            self._host_token_ids[index] = token_ids.numpy()
        else:
            self.token_ids.view(-1)[to_device(index, self.device)] = token_ids.to(torch.int32)
        self.num_tokens[rows] = positions + 1
