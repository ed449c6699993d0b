from __future__ import annotations

import pytest
import torch

from chairlift.kernels.recurrence import RecurrentKernel, RecurrentState
from chairlift.kernels.triton import recurrence
from chairlift.kernels.triton.recurrence import TritonRecurrence
from support.case_loop import loop_over
from support.recurrences import KINDS, random_recurrence, slot_values, state_step
from support.reference_recurrence import ReferenceRecurrence

LENGTHS = (4, 2, 1)
SEQUENCES = range(len(LENGTHS))


def random_rows(num_rows: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((num_rows, width), generator=torch.Generator().manual_seed(seed)) * 1.5


def empty_states(kernel: RecurrentKernel, num_slots: int) -> RecurrentState:
    """States of earlier requests, which are not read."""
    state = kernel.allocate(num_slots)
    for each in state:
        if each is not None:
            each.fill_(torch.nan)
    return state


CASES = [(kind, torch.float32, 3e-5) for kind in KINDS]
CASES += [("short_convolution", torch.bfloat16, 0.04), ("channel_decay", torch.bfloat16, 0.04)]


@loop_over(("kind", "dtype", "rounding"), CASES)
def test_results_and_states_are_their_definition(kind: str, dtype: torch.dtype, rounding: float) -> None:
    """The snapshot of a sequence may replace its source."""
    rule, width = random_recurrence(kind)
    rows = random_rows(6, width).to(dtype)
    first = state_step([3, 2], [-1, -1], [1, 0], [(0, 1, 4), (0, 2, 2)])
    second = state_step([1, 2, 2], [0, 1, -1], [0, 5, -1], [(1, 1, 1)])
    found, defined = TritonRecurrence(rule), ReferenceRecurrence(rule)
    states = empty_states(found, 6), empty_states(defined, 6)
    for step in (first, second):
        results = found(rows, states[0], step)[:5], defined(rows.float(), states[1], step)[:5]
        torch.testing.assert_close(results[0].float(), results[1], rtol=rounding, atol=rounding)
        for slot in range(6):
            values = (slot_values(state, slot) for state in states)
            torch.testing.assert_close(*values, rtol=rounding, atol=rounding, equal_nan=True)


def test_heads_larger_than_a_block_are_their_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "STATE_BLOCK", 64)
    monkeypatch.setattr(recurrence, "CHANNEL_BLOCK", 16)
    monkeypatch.setattr(recurrence, "SNAPSHOT_BLOCK", recurrence.tl.constexpr(2))
    rule, width = random_recurrence("gated_delta")
    step = state_step([1, 2, 1, 2, 1], [-1] * 5, [0, 1, 2, 3, 4], [(1, 1, 5), (3, 1, 6), (4, 1, 7)])
    found, defined = TritonRecurrence(rule), ReferenceRecurrence(rule)
    states, rows = (found.allocate(8), defined.allocate(8)), random_rows(7, width)
    results = found(rows, states[0], step), defined(rows, states[1], step)
    torch.testing.assert_close(*results, rtol=3e-5, atol=3e-5)
    for slot in range(8):
        torch.testing.assert_close(*(slot_values(state, slot) for state in states), rtol=3e-5, atol=3e-5)


@loop_over("kind", KINDS)
def test_any_division_into_steps_and_any_batch_give_the_same_bits(kind: str) -> None:
    """Sequence i has slot i, and slot 3 + i for the state after the first token of a step."""
    rule, width = random_recurrence(kind)
    kernel = TritonRecurrence(rule)
    rows = [random_rows(length, width, seed) for seed, length in enumerate(LENGTHS)]
    alone: list[list[torch.Tensor]] = [[] for _ in rows]
    after: list[list[torch.Tensor]] = [[] for _ in rows]
    for i, each in enumerate(rows):
        state = empty_states(kernel, 1)
        for token, row in enumerate(each):
            alone[i].append(kernel(row[None], state, state_step([1], [0 if token else -1], [0])))
            after[i].append(slot_values(state, 0).clone())
    for counts in ([LENGTHS], [(1, 0, 1), (0, 2, 0), (3, 0, 0)]):
        state, done = empty_states(kernel, 6), [0, 0, 0]
        for step_counts in counts:
            order = [i for i in reversed(SEQUENCES) if step_counts[i]]
            lengths = [step_counts[i] for i in order]
            sources, kept = [i if done[i] else -1 for i in order], [(at, 1, 3 + i) for at, i in enumerate(order)]
            packed = torch.cat([rows[i][done[i] : done[i] + step_counts[i]] for i in order])
            found = kernel(packed, state, state_step(lengths, sources, order, kept)).split(lengths)
            for i, part in zip(order, found, strict=True):
                assert torch.equal(part, torch.cat(alone[i][done[i] : done[i] + len(part)]))
                assert torch.equal(slot_values(state, 3 + i), after[i][done[i]])
                done[i] += len(part)
                assert torch.equal(slot_values(state, i), after[i][done[i] - 1])


def test_padding_writes_no_state_and_a_source_remains() -> None:
    rule, width = random_recurrence("gated_delta")
    kernel, rows = TritonRecurrence(rule), random_rows(6, width)
    state = kernel.allocate(2)
    kernel(rows[:3], state, state_step([3], [-1], [0]))
    before = slot_values(state, 0)
    padded = kernel(rows, state, state_step([3, 1], [0, -1], [1, -1]))
    assert torch.equal(slot_values(state, 0), before)
    assert len(padded) == 6, "rows after the last sequence have a place in the result"
    again = kernel(rows[:3], state, state_step([3], [0], [0]))
    assert torch.equal(padded[:3], again)
    assert torch.equal(slot_values(state, 0), slot_values(state, 1))


def test_parts_of_rows_are_read_where_they_are() -> None:
    rule, width = random_recurrence("mamba2")
    rows, kernel = random_rows(4, width + 12), TritonRecurrence(rule)
    step = state_step([4], [-1], [0])
    whole = kernel(rows[:, 4 : 4 + width].contiguous(), kernel.allocate(1), step)
    assert torch.equal(kernel(rows[:, 4 : 4 + width], kernel.allocate(1), step), whole)
