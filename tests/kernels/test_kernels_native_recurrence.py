"""Native recurrences against the reference, and the same bits for any batch, division into steps and threads."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.recurrence import NativeStates
from chairlift.kernels.cpu.tape import record_calls
from chairlift.kernels.kernel_set import get_kernels
from chairlift.kernels.recurrence import (
    Convolution,
    GatedDelta,
    Mamba2,
    Recurrence,
    RecurrentKernel,
    RecurrentState,
    ShortConvolution,
    StateStep,
)
from support.case_loop import loop_over
from support.native import LOOP_ISAS, needs_native
from support.recurrences import state_step
from support.reference_recurrence import ReferenceRecurrence

pytestmark = [needs_native, pytest.mark.usefixtures("same_threads")]

NUM_SLOTS = 8
Norm = Literal["none", "before gate", "after gate"]


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def convolution(channels: int, width: int, has_bias: bool = True) -> Convolution:
    return Convolution(randn(channels, width) * 0.5, randn(channels, seed=1) if has_bias else None)


def gated_delta(
    heads: int, key_heads: int, key_dim: int, value_dim: int, width: int = 4, by_channel: bool = False
) -> GatedDelta:
    decays = heads * key_dim if by_channel else heads
    channels = 2 * key_heads * key_dim + heads * value_dim
    return GatedDelta(
        convolution=convolution(channels, width, has_bias=False),
        num_key_heads=key_heads,
        num_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        decay=-randn(decays, seed=2).abs(),
        dt_bias=randn(decays, seed=3),
        norm_weight=randn(value_dim, seed=4),
        norm_eps=1e-5,
        beta_scale=2.0 if key_heads > 1 else 1.0,
        has_channel_decay=by_channel,
        gate="sigmoid" if by_channel else "silu",
    )


def mamba2(
    heads: int, groups: int, state_size: int, head_dim: int, width: int = 4, norm: Norm = "none", scaled: bool = False
) -> Mamba2:
    channels, outputs = heads * head_dim + 2 * groups * state_size, heads * head_dim
    return Mamba2(
        convolution=convolution(channels, width),
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=state_size,
        decay=-randn(heads, seed=2).abs(),
        dt_bias=randn(heads, seed=3),
        skip=randn(heads, seed=4),
        norm_weight=None if norm == "none" else randn(outputs, seed=5),
        norm_eps=1e-5,
        norm_before_gate=norm == "before gate",
        dt_limits=(0.1, 1.5) if scaled else (0.0, float("inf")),
        projection_scales=randn(outputs + channels + heads, seed=6) if scaled else None,
    )


RECURRENCES: dict[str, Recurrence] = {
    "LFM2": ShortConvolution(convolution(2048, 3, has_bias=False)),
    "short convolution with a bias": ShortConvolution(convolution(37, 4)),
    "short convolution of width 2": ShortConvolution(convolution(8, 2)),
    **{f"short convolution of width {width}": ShortConvolution(convolution(8, width)) for width in (5, 6, 7)},
    "Qwen3.5": gated_delta(4, 4, 128, 128),
    "shared keys": gated_delta(6, 2, 64, 128),
    "narrow keys": gated_delta(4, 2, 8, 24, width=3),
    "sizes that are no multiples of 8": gated_delta(3, 1, 7, 21, width=2),
    "Kimi Linear": gated_delta(4, 4, 128, 128, by_channel=True),
    "channel decays of odd sizes": gated_delta(6, 3, 7, 21, width=2, by_channel=True),
    "Mamba-2": mamba2(8, 1, 128, 64, norm="after gate"),
    "groups": mamba2(4, 2, 128, 80, norm="after gate"),
    "norm before the gate": mamba2(4, 2, 256, 64, norm="before gate", scaled=True),
    "scaled projections": mamba2(6, 3, 16, 40, scaled=True),
    "a narrow head": mamba2(5, 1, 11, 3, width=3),
}
SMALL = [
    RECURRENCES[name]
    for name in (
        "short convolution with a bias",
        "narrow keys",
        "sizes that are no multiples of 8",
        "a narrow head",
        "channel decays of odd sizes",
    )
]


def in_features(recurrence: Recurrence) -> int:
    if isinstance(recurrence, ShortConvolution):
        return 3 * recurrence.out_features
    parts = recurrence.row_parts
    return sum(parts.values() if isinstance(parts, dict) else parts)


def random_state(kernel: RecurrentKernel, recurrence: Recurrence) -> RecurrentState:
    """States of normal random numbers, the same in all kernel sets."""
    state = kernel.allocate(NUM_SLOTS)
    for seed, values in enumerate(tensors(state)):
        assert not values.any()
        values.copy_(randn(*values.shape, seed=seed) * 0.5)
    return state


def tensors(state: RecurrentState) -> list[torch.Tensor]:
    return [values for values in state if values is not None]


def run(kernel: RecurrentKernel, rows: torch.Tensor, state: RecurrentState, step: StateStep) -> torch.Tensor:
    return kernel(rows.clone(), state, step).clone()


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("isa", LOOP_ISAS, indirect=True)
@loop_over("name", RECURRENCES)
def test_results_and_states_are_those_of_the_reference(name: str, isa: str) -> None:
    recurrence = RECURRENCES[name]
    step = state_step([1, 7, 3, 1, 1], [0, -1, 4, 5, -1], [0, 1, 2, 6, -1], [(1, 2, 3), (3, 1, 7)])
    rows = randn(15, in_features(recurrence), seed=7)
    native, reference = get_kernels("native").make_recurrence(recurrence), ReferenceRecurrence(recurrence)
    state, expected = random_state(native, recurrence), random_state(reference, recurrence)
    load().set_num_threads(2)
    got, wanted = run(native, rows, state, step), run(reference, rows, expected, step)
    assert got.shape == (15, recurrence.out_features)
    assert_close(got[:13], wanted[:13])  # two rows do not belong to a sequence
    for ours, theirs in zip(tensors(state), tensors(expected), strict=True):
        assert_close(ours, theirs)


@loop_over("name", ["Qwen3.5", "Kimi Linear", "Mamba-2"])
def test_extreme_gates(name: str) -> None:
    recurrence = RECURRENCES[name]
    rows = randn(6, in_features(recurrence))
    heads = 4 if isinstance(recurrence, GatedDelta) else 8
    gates = rows[:, : heads * 128] if name == "Kimi Linear" else rows[:, -2 * heads :]
    gates[:] = torch.tensor([-200.0, -30.0, -1e-3, 19.9, 21.0, 200.0])[:, None]
    step = state_step([6], [0], [1])
    native, reference = get_kernels("native").make_recurrence(recurrence), ReferenceRecurrence(recurrence)
    state, expected = random_state(native, recurrence), random_state(reference, recurrence)
    assert_close(run(native, rows, state, step), run(reference, rows, expected, step))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bits_do_not_depend_on_batch_steps_and_threads(data: st.DataObject) -> None:
    """Each sequence alone in one step on one thread, and all of them in random pieces with others on many threads."""
    native, recurrence = load(), data.draw(st.sampled_from(SMALL))
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    rows = [randn(length, in_features(recurrence), seed=seed) for seed, length in enumerate(lengths)]
    first_sources = [-1, 6, 7][: len(lengths)]
    kernel = get_kernels("native").make_recurrence(recurrence)
    native.set_num_threads(1)
    native.set_tile_order(0)
    alone, crowd = random_state(kernel, recurrence), random_state(kernel, recurrence)
    expected = [run(kernel, rows[i], alone, state_step([n], [first_sources[i]], [i])) for i, n in enumerate(lengths)]
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))}) for n in lengths]
    pieces = [list(pairwise(each)) for each in cuts]
    results: list[list[torch.Tensor]] = [[] for _ in lengths]
    while left := [i for i, waiting in enumerate(pieces) if waiting]:
        native.set_num_threads(data.draw(st.integers(1, 4)))
        native.set_tile_order(data.draw(st.integers(0, 3)))
        active = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        spans = [pieces[i].pop(0) for i in active]
        sources = [i if results[i] else first_sources[i] for i in active]
        sizes = [stop - start for start, stop in spans]
        packed = torch.cat([rows[i][start:stop] for i, (start, stop) in zip(active, spans, strict=True)])
        parts = run(kernel, packed, crowd, state_step(sizes, sources, active)).split(sizes)
        for i, part in zip(active, parts, strict=True):
            results[i].append(part)
    for wanted, found in zip(expected, results, strict=True):
        assert torch.equal(torch.cat(found), wanted)
    for ours, theirs in zip(tensors(crowd), tensors(alone), strict=True):
        assert torch.equal(ours, theirs)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_snapshots_are_the_states_of_shorter_sequences(data: st.DataObject) -> None:
    recurrence = data.draw(st.sampled_from(SMALL))
    length = data.draw(st.integers(1, 12))
    counts = sorted(data.draw(st.lists(st.integers(1, length), min_size=1, max_size=4, unique=True)))
    rows = randn(length, in_features(recurrence))
    kernel = get_kernels("native").make_recurrence(recurrence)
    state, shorter = random_state(kernel, recurrence), random_state(kernel, recurrence)
    snapshots = [(0, count, 2 + index) for index, count in enumerate(counts)]
    run(kernel, rows, state, state_step([length], [0], [data.draw(st.sampled_from([-1, 1]))], snapshots))
    for _, count, slot in snapshots:
        run(kernel, rows[:count], shorter, state_step([count], [0], [slot]))
        for ours, theirs in zip(tensors(state), tensors(shorter), strict=True):
            assert torch.equal(ours[slot], theirs[slot])


@loop_over("name", ["LFM2", "shared keys", "channel decays of odd sizes", "groups"])
def test_a_recording_reads_the_slots_of_the_later_step(name: str) -> None:
    native, recurrence = load(), RECURRENCES[name]
    kernel = get_kernels("native").make_recurrence(recurrence)
    state, expected = random_state(kernel, recurrence), random_state(kernel, recurrence)
    steps = [state_step([1, 1], [0, 1], [0, 1]), state_step([2], [-1], [3])]
    rows, inputs = randn(2, in_features(recurrence)), [randn(2, in_features(recurrence), seed=i) for i in (8, 9)]
    tape = native.Tape()
    with record_calls(tape):
        out = kernel(rows.copy_(inputs[0]), state, steps[0])
    rows.copy_(inputs[1])
    tape.replay([], 0, NativeStates().convert(steps[1]))
    replayed = out.clone()
    run(kernel, inputs[0], expected, steps[0])
    assert torch.equal(replayed, run(kernel, inputs[1], expected, steps[1]))
    for ours, theirs in zip(tensors(state), tensors(expected), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="states must not be None"):
        tape.replay([], 0)


def test_slots_and_widths_that_do_not_fit_are_rejected() -> None:
    kernel = get_kernels("native").make_recurrence(SMALL[0])
    with pytest.raises(ValueError, match="the step has slots up to 8, and the state has 8"):
        run(kernel, randn(1, in_features(SMALL[0])), random_state(kernel, SMALL[0]), state_step([1], [0], [NUM_SLOTS]))
    with pytest.raises(ConfigError, match="must have a width of 2 to 7 with native kernels, got 8: choose"):
        get_kernels("native").make_recurrence(ShortConvolution(convolution(8, 8)))


@loop_over(
    ("arguments", "message"),
    [
        (([1, 1], [0, 0], [0, 1]), "slot 0 is written by one sequence, and read or written by another one"),
        (([1, 1], [0, 1], [2, 2]), "slot 2 is written by one sequence"),
        (([2], [0], [0], [(0, 3, 1)]), "counts of snapshots must ascend from 1 to the tokens of the sequence"),
        (([2], [0], [0], [(1, 1, 1)]), "snapshots must be in the order of the sequences"),
        (([1], [-2], [0]), "slots must be -1 or greater"),
    ],
)
def test_steps_that_contradict_themselves(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NativeStates().convert(state_step(*arguments))


@loop_over("name", RECURRENCES)
def test_the_size_of_the_copied_parameters(name: str) -> None:
    recurrence = RECURRENCES[name]
    kernel: Any = get_kernels("native").make_recurrence(recurrence)
    own = [getattr(recurrence, field) for field in recurrence.__slots__ if field != "convolution"]
    values = [recurrence.convolution.weight, recurrence.convolution.bias, *own]
    assert kernel.num_bytes == sum(4 * value.numel() for value in values if isinstance(value, torch.Tensor))
