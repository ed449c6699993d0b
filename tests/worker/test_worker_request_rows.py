from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from worker_fakes import new_request

from chairlift.worker.input_batch import InputBatch, gather_input_batch
from chairlift.worker.request_rows import RequestRows

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
