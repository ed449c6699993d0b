"""The inputs of a step of a static batch: padding is computed and not written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from worker_fakes import new_request

from chairlift.core.kv.block_tables import NO_BLOCK
from chairlift.worker.input_batch import InputBatch, gather_input_batch
from chairlift.worker.request_rows import RequestRows

BLOCK_SIZE = 4


def pack(scheduled: dict[str, int], padding: dict[str, int]) -> InputBatch:
    """Pack a step for a new request, one with 3 of 5 tokens in memory, and one that has finished with 6 tokens."""
    rows = RequestRows(3, 16, BLOCK_SIZE, torch.device("cpu"))
    rows.add(new_request("begins", [10, 11, 12, 13], blocks=[5]))
    rows.add(new_request("goes on", [20, 21, 22, 23, 24], num_computed=3, blocks=[7, 2]))
    rows.add(new_request("done", [30, 31, 32, 33, 34, 35, 36], num_computed=6, blocks=[1, 3]))
    return gather_input_batch(rows, scheduled, padding)


def test_padding_is_packed_before_the_tokens_and_has_no_slot() -> None:
    batch = pack({"begins": 2, "goes on": 1}, {"begins": 1, "goes on": 2})
    assert batch.token_ids.tolist() == [10, 10, 11, 20, 20, 23]
    assert batch.positions.tolist() == [0, 0, 1, 0, 0, 3]
    assert batch.attention[0].slot_mapping.tolist() == [-1, 20, 21, -1, -1, 31]
    assert (batch.token_start.tolist(), batch.token_end.tolist()) == ([1, 5], [3, 6])
    assert batch.num_scheduled.tolist() == [2, 1]


def test_padding_before_tokens_is_a_sequence_that_attends_to_nothing() -> None:
    (attention,) = pack({"begins": 2, "goes on": 1}, {"begins": 1, "goes on": 2}).attention
    assert attention.query_start_loc_host == [0, 1, 3, 5, 6]
    assert attention.seq_lens_host == [0, 2, 0, 4]
    assert attention.block_tables[:, 0].tolist() == [5, 5, 7, 7]


def test_a_row_with_padding_only_attends_to_its_computed_tokens_and_samples_nothing() -> None:
    batch = pack({"goes on": 2, "done": 0, "begins": 0}, {"done": 2, "begins": 2})
    assert batch.attention[0].query_start_loc_host == [0, 2, 4, 6]
    assert batch.attention[0].seq_lens_host == [5, 6, 0]
    assert batch.attention[0].slot_mapping.tolist() == [31, 8, -1, -1, -1, -1]
    assert batch.samples.tolist() == [True, False, False]


def test_without_padding_only_scheduled_tokens_are_packed() -> None:
    plain, empty = pack({"begins": 4}, {}), pack({"begins": 4, "goes on": 2}, {"goes on": 1})
    assert plain.token_ids.tolist() == [10, 11, 12, 13]
    assert plain.attention[0].query_start_loc_host == [0, 4]
    assert empty.attention[0].query_start_loc_host == [0, 4, 5, 7]
    assert np.array_equal(plain.samples, [True])


def test_a_step_that_computes_the_last_known_tokens_is_a_decode() -> None:
    batch = pack({"done": 1}, {})
    assert batch.is_decode
    assert batch.samples.tolist() == [True]
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([36], [6])
    assert batch.attention[0].slot_mapping.tolist() == [3 * BLOCK_SIZE + 2]
    assert (batch.attention[0].query_start_loc_host, batch.attention[0].seq_lens_host) == ([0, 1], [7])
    assert not pack({"done": 1, "goes on": 1}, {}).is_decode, "one token of two"
    assert not pack({"done": 1, "goes on": 2}, {}).is_decode
    assert not pack({"done": 1, "goes on": 0}, {"goes on": 1}).is_decode


def test_cached_rows_are_invalidated_when_requests_are_added() -> None:
    rows = RequestRows(3, 16, BLOCK_SIZE, torch.device("cpu"))
    for name in ("a", "b", "c"):
        rows.add(new_request(name, [1, 2]))
    before = rows.rows_of(["a", "b"]).tolist()
    assert rows.rows_of(["b", "a"]).tolist() == before[::-1]
    rows.remove("b")
    rows.remove("a")
    rows.add(new_request("b", [1, 2]))
    rows.add(new_request("a", [1, 2]))
    assert rows.rows_of(["b", "a"]).tolist() == before


def test_every_group_has_slots_of_its_own_and_released_blocks_are_replaced_by_valid_ids() -> None:
    rows = RequestRows(2, 16, BLOCK_SIZE, torch.device("cpu"), num_groups=2)
    tables = [[7, 2, 4], [NO_BLOCK, 9, 5]]
    rows.add(replace(new_request("a", list(range(10)), num_computed=8), block_ids=tables))
    full, window = gather_input_batch(rows, {"a": 2}, {}).attention
    assert (full.slot_mapping.tolist(), window.slot_mapping.tolist()) == ([16, 17], [20, 21])
    assert (full.block_tables.tolist(), window.block_tables.tolist()) == ([[7, 2, 4]], [[0, 9, 5]])
    rows.append_blocks(rows.row_of("a"), [[], [1]])
    assert [lengths[rows.row_of("a")] for lengths in rows.num_blocks] == [3, 4]


def test_states_continue_a_checkpoint_then_the_row_and_padding_writes_none() -> None:
    rows = RequestRows(3, 16, BLOCK_SIZE, torch.device("cpu"))
    known = {
        "first": rows.add(new_request("first", range(12), blocks=[5, 6, 7])),
        "hit": rows.add(replace(new_request("hit", range(6), num_computed=4, blocks=[5, 2]), checkpoint=1)),
    }
    scheduled, padding = {"first": 9, "hit": 0}, {"first": 1, "hit": 10}
    checkpoints = {"first": [(4, 2), (8, 0)]}
    states = gather_input_batch(rows, scheduled, padding, checkpoints=checkpoints).states
    assert states is not None
    assert states.query_start_loc.tolist() == [0, 1, 10, 20]
    assert states.sources.tolist() == [-1, -1, -1], "the zero state, and padding"
    assert states.slots.tolist() == [-1, known["first"], -1]
    assert states.snapshots.tolist() == [[1, 4, 5], [1, 8, 3]], "the slots of checkpoints follow the 3 rows"
    rows.advance(np.array(list(known.values())), np.array([9, 0]))
    states = gather_input_batch(rows, {"hit": 2, "first": 3}, checkpoints={"first": [(12, 1)]}).states
    assert states is not None
    assert states.sources.tolist() == [3 + 1, known["first"]], (
        "a row that has computed nothing continues its checkpoint"
    )
    assert states.slots.tolist() == [known["hit"], known["first"]]
    assert states.snapshots.tolist() == [[1, 3, 4]]
    rows.advance(np.array(list(known.values())), np.array([3, 2]))
    assert gather_input_batch(rows, {"hit": 0, "first": 0}, {"hit": 1, "first": 1}).states is None
