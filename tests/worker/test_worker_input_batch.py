"""The inputs of a step, and the rows of its requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
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


MAX_SEQS = 4
MAX_MODEL_LEN = 19


@dataclass
class _Naive:
    token_ids: list[int]
    num_prompt: int
    num_computed: int
    blocks: list[int] = field(default_factory=list)


class RowsMachine(RuleBasedStateMachine):
    """Compares rows and gathered batches with lists of Python integers."""

    @initialize(block_size=st.sampled_from([1, 3, 4, 16, 32]), in_torch=st.booleans())
    def start(self, block_size: int, in_torch: bool) -> None:
        self.block_size = block_size
        self.rows = RequestRows(MAX_SEQS, MAX_MODEL_LEN, block_size, torch.device("cpu"))
        if in_torch:  # as on every other device
            self.rows._host_token_ids = None
        self.naive: dict[str, _Naive] = {}
        self.num_added = 0

    def _blocks(self, data: st.DataObject, num_slots: int, held: int) -> list[int]:
        missing = max(0, -(-num_slots // self.block_size) - held)
        count = missing + data.draw(st.integers(0, 2))
        return data.draw(st.lists(st.integers(0, 999), min_size=count, max_size=count))

    def _pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.naive)))

    @precondition(lambda self: len(self.naive) < MAX_SEQS)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        tokens = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=MAX_MODEL_LEN))
        request = _Naive(tokens, data.draw(st.integers(1, len(tokens))), data.draw(st.integers(0, len(tokens) - 1)))
        request.blocks = self._blocks(data, len(tokens), 0)
        name = f"r{self.num_added}"
        self.num_added += 1
        self.naive[name] = request
        self.rows.add(
            new_request(
                name, tokens, num_prompt=request.num_prompt, num_computed=request.num_computed, blocks=request.blocks
            )
        )

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = self._pick(data)
        del self.naive[name]
        self.rows.remove(name)
        assert name not in self.rows._row_of

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def run_a_step(self, data: st.DataObject) -> None:
        behind = [name for name, r in self.naive.items() if r.num_computed < len(r.token_ids)]
        chosen = data.draw(st.lists(st.sampled_from(behind), unique=True)) if behind else []
        if not chosen:
            return
        counts: dict[str, int] = {}
        for name in chosen:
            request = self.naive[name]
            counts[name] = data.draw(st.integers(1, len(request.token_ids) - request.num_computed))
        batch = gather_input_batch(self.rows, counts)
        self._check_batch(batch, counts)
        self.rows.advance(batch.rows, batch.num_scheduled)
        self._sample(data, batch, counts)

    def _sample(self, data: st.DataObject, batch: InputBatch, counts: dict[str, int]) -> None:
        sampling = []
        for i, name in enumerate(counts):
            request = self.naive[name]
            request.num_computed += counts[name]
            assert batch.samples[i] == (request.num_computed == len(request.token_ids))
            if batch.samples[i] and len(request.token_ids) < MAX_MODEL_LEN:
                sampling.append(name)
                request.token_ids.append(data.draw(st.integers(0, 2**31 - 1)))
        if not sampling:
            return
        tokens = [self.naive[name].token_ids[-1] for name in sampling]
        self.rows.append_sampled(self.rows.rows_of(sampling), torch.tensor(tokens))
        for name in sampling:
            request = self.naive[name]
            more = self._blocks(data, len(request.token_ids), len(request.blocks))
            request.blocks += more
            self.rows.append_blocks(self.rows.row_of(name), [more])

    def _check_batch(self, batch: InputBatch, counts: dict[str, int]) -> None:
        tokens, positions, slots, starts, seq_lens = [], [], [], [0], []
        for name, count in counts.items():
            request = self.naive[name]
            for position in range(request.num_computed, request.num_computed + count):
                tokens.append(request.token_ids[position])
                positions.append(position)
                block = request.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(tokens))
            seq_lens.append(positions[-1] + 1)
        (attention,) = batch.attention
        assert batch.request_ids == list(counts)
        assert (batch.token_ids.tolist(), batch.token_ids.dtype) == (tokens, torch.int64)
        assert (batch.positions.tolist(), batch.positions.dtype) == (positions, torch.int64)
        assert (attention.slot_mapping.tolist(), attention.slot_mapping.dtype) == (slots, torch.int64)
        assert (attention.query_start_loc.tolist(), attention.query_start_loc.dtype) == (starts, torch.int32)
        assert (attention.seq_lens.tolist(), attention.seq_lens.dtype) == (seq_lens, torch.int32)
        assert (attention.query_start_loc_host, attention.seq_lens_host) == (starts, seq_lens)
        assert attention.block_tables.dtype == torch.int32
        for row, name, seq_len in zip(attention.block_tables.tolist(), counts, seq_lens, strict=True):
            held = -(-seq_len // self.block_size)
            assert row[:held] == self.naive[name].blocks[:held]
            assert all(0 <= block <= 999 for block in row)

    @invariant()
    def rows_hold_what_was_put_in(self) -> None:
        if not hasattr(self, "rows"):
            return
        assert len(self.rows._row_of) == len(self.naive)
        assert len({self.rows.row_of(name) for name in self.naive}) == len(self.naive)
        for name, request in self.naive.items():
            row = self.rows.row_of(name)
            num_blocks = min(len(request.blocks), self.rows.max_blocks_per_seq)
            assert self.rows.num_tokens[row] == len(request.token_ids)
            assert self.rows.num_prompt_tokens[row] == request.num_prompt
            assert self.rows.num_computed_tokens[row] == request.num_computed
            assert self.rows.token_ids[row, : len(request.token_ids)].tolist() == request.token_ids
            assert self.rows.num_blocks[0][row] == num_blocks
            assert np.array_equal(self.rows.block_tables[0][row, :num_blocks], request.blocks[:num_blocks])


RowsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_rows_and_batches = RowsMachine.TestCase


@pytest.mark.parametrize("is_on_host", [True, False])
def test_tokens_from_returns_the_tokens_from_a_position_on(is_on_host: bool) -> None:
    rows = RequestRows(3, 10, 4, torch.device("cpu"))
    of = {name: rows.add(new_request(name, tokens)) for name, tokens in {"a": [1, 2, 3], "b": [4, 5, 6, 7]}.items()}
    if not is_on_host:
        rows._host_token_ids = None
    rows.append_sampled(np.array([of["a"]]), torch.tensor([8]))
    assert rows.tokens_from([of["b"], of["a"], of["b"]], [1, 3, 4]) == [[5, 6, 7], [8], []]
    assert rows.tokens_from([], []) == []
