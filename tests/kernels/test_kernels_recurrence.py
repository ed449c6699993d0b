"""Recurrences: the definition against formulas, each set against the definition, and the same bits in any step."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.kernels.kernel_set import get_kernels
from chairlift.kernels.recurrence import (
    GatedDelta,
    Mamba2,
    Recurrence,
    RecurrentKernel,
    RecurrentState,
    ShortConvolution,
)
from support.case_loop import loop_over
from support.native import needs_native
from support.recurrences import KINDS, compute_alone, random_recurrence, slot_values, state_step
from support.reference_recurrence import parts_of

SETS = ("reference", "torch", pytest.param("native", marks=needs_native))


def make_kernel(name: str, kind: str) -> tuple[RecurrentKernel, int]:
    recurrence, width = random_recurrence(kind)
    return get_kernels(name).make_recurrence(recurrence), width


def random_rows(num_rows: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((num_rows, width), generator=torch.Generator().manual_seed(seed)) * 1.5


def convolved(recurrence: Recurrence, x: torch.Tensor) -> torch.Tensor:
    """The convolution of [T, channels] by torch."""
    convolution = recurrence.convolution
    bias = None if convolution.bias is None else convolution.bias.double()
    padded = F.pad(x.t(), (convolution.width - 1, 0))
    return F.conv1d(padded[None], convolution.weight[:, None].double(), bias, groups=convolution.num_channels)[0].t()


def short_convolution(rule: ShortConvolution, rows: torch.Tensor) -> torch.Tensor:
    b, c, x = rows.chunk(3, dim=1)
    return c * convolved(rule, b * x)


def gated_delta(rule: GatedDelta, rows: torch.Tensor) -> torch.Tensor:
    """The states as products of matrices: S = (I - beta k k') diag(exp(g)) S + beta k v'."""
    qkv, z, b, a = (parts_of(rule, rows)[name] for name in ("qkv", "z", "b", "a"))
    keys = rule.num_key_heads * rule.key_dim
    q, k, v = torch.split(F.silu(convolved(rule, qkv)), [keys, keys, rule.out_features], dim=1)
    out = torch.empty(len(rows), rule.num_heads, rule.value_dim, dtype=torch.float64)
    for head in range(rule.num_heads):
        is_tiled = rule.has_tiled_keys
        group = head % rule.num_key_heads if is_tiled else head * rule.num_key_heads // rule.num_heads
        state = torch.zeros(rule.key_dim, rule.value_dim, dtype=torch.float64)
        for t in range(len(rows)):
            query, key = (part[t].view(-1, rule.key_dim)[group] for part in (q, k))
            query, key = query / (query @ query + 1e-6).sqrt(), key / (key @ key + 1e-6).sqrt()
            value = v[t].view(-1, rule.value_dim)[head]
            g = (rule.decay * F.softplus(a[t] + rule.dt_bias)).view(rule.num_heads, -1)[head]
            beta = rule.beta_scale * torch.sigmoid(b[t, head])
            decayed = g.exp()[:, None] * state
            state = (torch.eye(rule.key_dim) - beta * torch.outer(key, key)) @ decayed
            state = state + beta * torch.outer(key, value)
            out[t, head] = query @ state / rule.key_dim**0.5
    normed = F.rms_norm(out, (rule.value_dim,), rule.norm_weight.double(), rule.norm_eps)
    return normed.flatten(1) * (torch.sigmoid(z) if rule.gate == "sigmoid" else F.silu(z))


def mamba2(rule: Mamba2, rows: torch.Tensor) -> torch.Tensor:
    """The outputs as sums over all earlier tokens: y[t] = sum over s <= t of exp(g[s + 1] + ... + g[t]) (C[t] B[s])
    dt[s] x[s] + D x[t]."""
    scales = torch.ones(()) if rule.projection_scales is None else rule.projection_scales
    z, xbc, dt = torch.split(rows * scales, list(rule.row_parts), dim=1)
    x, b, c = torch.split(F.silu(convolved(rule, xbc)), list(rule.mixed_parts), dim=1)
    t = F.softplus(dt + rule.dt_bias).clamp(*rule.dt_limits)
    total = (rule.decay * t).cumsum(0)
    out = torch.empty(len(rows), rule.num_heads, rule.head_dim, dtype=torch.float64)
    for head in range(rule.num_heads):
        group = head * rule.num_groups // rule.num_heads
        values = x.view(len(rows), rule.num_heads, -1)[:, head]
        keys, queries = (part.view(len(rows), rule.num_groups, -1)[:, group] for part in (b, c))
        decays = (total[:, None, head] - total[None, :, head]).tril().exp().tril()
        out[:, head] = (decays * (queries @ keys.t())) @ (t[:, head, None] * values) + rule.skip[head] * values
    y, gate = out.flatten(1), F.silu(z)
    if rule.norm_weight is None:
        return y * gate
    groups = (y if rule.norm_before_gate else y * gate).view(len(rows), -1, rule.norm_group_size)
    normed = F.rms_norm(groups, groups.shape[-1:], eps=rule.norm_eps).flatten(1) * rule.norm_weight
    return normed * gate if rule.norm_before_gate else normed


@loop_over("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_a_recurrence_is_its_formula(name: str, kind: str) -> None:
    recurrence, width = random_recurrence(kind)
    rows = random_rows(9, width)
    formula = {ShortConvolution: short_convolution, GatedDelta: gated_delta, Mamba2: mamba2}[type(recurrence)]
    kernel = get_kernels(name).make_recurrence(recurrence)
    found = kernel(rows.clone(), kernel.allocate(1), state_step([9], [-1], [0]))
    torch.testing.assert_close(found.double(), formula(recurrence, rows.double()), rtol=2e-4, atol=2e-4)


@loop_over("kind", KINDS)
@pytest.mark.parametrize("name", SETS[1:])
def test_the_states_of_the_sets_agree(name: str, kind: str) -> None:
    (defined, width), (kernel, _) = (make_kernel(each, kind) for each in ("reference", name))
    rows = random_rows(7, width)
    step = state_step([4, 3], [-1, -1], [1, 0], [(0, 2, 2)])
    states = defined.allocate(3), kernel.allocate(3)
    for each, state in zip((defined, kernel), states, strict=True):
        each(rows.clone(), state, step)
    for slot in range(3):
        torch.testing.assert_close(*(slot_values(state, slot) for state in states), rtol=1e-4, atol=1e-5)


@cache
def whole_sequences(name: str, kind: str) -> list[tuple[torch.Tensor, torch.Tensor, list[RecurrentState]]]:
    """The rows of three sequences of 9 tokens, their results, and the state after each token."""
    kernel, width = make_kernel(name, kind)
    rows = [random_rows(9, width, seed) for seed in range(3)]
    return [(each, *compute_alone(kernel, each)) for each in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_division_into_steps_and_any_batch_give_the_same_bits(name: str, kind: str, data: st.DataObject) -> None:
    """Each sequence has slot `sequence`, and slot 3 + sequence for a snapshot in the middle of a step."""
    kernel, whole = make_kernel(name, kind)[0], whole_sequences(name, kind)
    sequences = [rows[: data.draw(st.integers(1, 9))] for rows, _, _ in whole]
    state, done = kernel.allocate(6), [0, 0, 0]
    for each in state:
        if each is not None:
            each.fill_(torch.nan)  # The states of earlier requests are not read.
    while remaining := [i for i in range(3) if done[i] < len(sequences[i])]:
        order = data.draw(st.permutations(data.draw(st.lists(st.sampled_from(remaining), min_size=1, unique=True))))
        counts = [data.draw(st.integers(1, len(sequences[i]) - done[i])) for i in order]
        taken = [data.draw(st.integers(1, count)) for count in counts]
        step = state_step(
            counts, [i if done[i] else -1 for i in order], order, [(at, n, 3 + order[at]) for at, n in enumerate(taken)]
        )
        packed = torch.cat([sequences[i][done[i] : done[i] + n] for i, n in zip(order, counts, strict=True)])
        found = kernel(packed.clone(), state, step).split(counts)
        for i, count, snapshot, rows in zip(order, counts, taken, found, strict=True):
            _, results, states = whole[i]
            assert torch.equal(rows, results[done[i] : done[i] + count])
            assert torch.equal(slot_values(state, i), slot_values(states[done[i] + count - 1], 0))
            assert torch.equal(slot_values(state, 3 + i), slot_values(states[done[i] + snapshot - 1], 0))
            done[i] += count


@pytest.mark.parametrize("name", SETS)
def test_padding_writes_no_state_and_a_source_remains(name: str) -> None:
    kernel, width = make_kernel(name, "gated_delta")
    rows, state = random_rows(6, width), kernel.allocate(2)
    first = kernel(rows[:3].clone(), state, state_step([3], [-1], [0]))
    before = slot_values(state, 0).clone()
    padded = kernel(rows.clone(), state, state_step([3, 1], [0, -1], [1, -1]))
    assert torch.equal(slot_values(state, 0), before)
    assert len(padded) == 6, "rows after the last sequence have a place in the result"
    again = kernel(rows[:3].clone(), state, state_step([3], [0], [0]))
    assert torch.equal(padded[:3], again)
    assert not torch.equal(first, again)
    assert torch.equal(slot_values(state, 0), slot_values(state, 1))
