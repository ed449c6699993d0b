"""The reference kernels equal plain formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from chairlift.kernels.attention import AttentionShape, KVCache
from chairlift.kernels.interface import NO_PROLOGUE, Prologue
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.rotary import rotary_table
from support import reference_kernels as reference
from support.case_loop import loop_over
from support.packed_steps import Tables, pack

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def shape(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 8) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, torch.float32, CPU)


def naive_attention(
    query: list[list[float]],
    keys: list[list[float]],
    values: list[list[float]],
    first: int,
    window: int | None,
    sink: float,
) -> list[list[float]]:
    """Attention of one head in plain Python floats; query row j is at position first + j."""
    out = []
    for j, row in enumerate(query):
        position = first + j
        low = 0 if window is None else max(0, position - window + 1)
        scores = [sum(a * b for a, b in zip(row, key, strict=True)) / math.sqrt(len(row)) for key in keys]
        weights = {i: math.exp(scores[i]) for i in range(low, position + 1)}
        total = sum(weights.values()) + math.exp(sink)
        out.append([sum(w * values[i][d] for i, w in weights.items()) / total for d in range(len(row))])
    return out


@loop_over("sinks", [None, [0.5, -2.0, 1.5, 3.0]])
@loop_over("window", [None, 1, 3, 100])
def test_paged_attention_equals_plain_attention(window: int | None, sinks: list[float] | None) -> None:
    torch.manual_seed(0)
    attention, tables = shape(), Tables(num_blocks=16, block_size=4)
    cache = reference.ReferenceAttention(attention).allocate(16, 4)
    history = pack(tables, [(0, 0, 9), (1, 0, 5)])
    step = pack(tables, [(0, 6, 9), (1, 4, 5)])
    key, value = torch.randn(14, 2, 8), torch.randn(14, 2, 8)
    reference.write_kv(key, value, cache, history.metadata.slot_mapping)
    query = torch.randn(4, 4, 8)
    scores = None if sinks is None else torch.tensor(sinks)
    out = reference.paged_attention(query, cache, step.metadata, attention.scale, window, sinks=scores)
    for rows, memory, first in ((slice(0, 3), slice(0, 9), 6), (slice(3, 4), slice(9, 14), 4)):
        for head in range(4):
            keys, values = key[memory, head // 2].tolist(), value[memory, head // 2].tolist()
            sink = -math.inf if sinks is None else sinks[head]
            expected = naive_attention(query[rows, head].tolist(), keys, values, first, window, sink)
            torch.testing.assert_close(out[rows, head], torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_rows_before_the_sequence_are_zero() -> None:
    cache = reference.ReferenceAttention(shape()).allocate(8, 4)
    step = pack(Tables(8, 4), [(0, 0, 2)], num_padding=3)
    cache.value.fill_(1.0)
    out = reference.paged_attention(torch.randn(5, 4, 8), cache, step.metadata, 1.0, None)
    assert torch.equal(out[:3], torch.zeros(3, 4, 8))
    torch.testing.assert_close(out[3:], torch.ones(2, 4, 8))


@given(st.lists(st.integers(-1, 23), max_size=12, unique_by=lambda slot: slot if slot >= 0 else object()))
def test_write_kv_touches_its_slots_only(slots: list[int]) -> None:
    """Slot s of head h is cache[s // block_size, h, s % block_size]; everything else is unchanged."""
    cache = KVCache(torch.randn(7, 2, 4, 8), torch.randn(7, 2, 4, 8))
    expected = [cache.key.clone(), cache.value.clone()]
    new = torch.randn(2, len(slots), 2, 8)
    reference.write_kv(new[0], new[1], cache, torch.tensor(slots, dtype=torch.int64))
    for half, values in zip(expected, new, strict=True):
        for token, slot in enumerate(slots):
            if slot >= 0:
                for head in range(2):
                    half[slot // 4, head, slot % 4] = values[token, head]
    assert torch.equal(cache.key, expected[0])
    assert torch.equal(cache.value, expected[1])


def test_rotary_embedding_rotates_pairs_by_their_angle() -> None:
    table = rotary_table(RopeConfig(theta=100.0), 8, 32, CPU)
    x, positions = torch.randn(3, 2, 8), torch.tensor([0, 5, 31])
    turned = torch.view_as_complex(torch.stack((x[..., :4], x[..., 4:]), dim=-1))
    angles = positions[:, None] * torch.tensor([100.0 ** (-2 * i / 8) for i in range(4)])
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(reference.rotate(x, positions, table), expected, rtol=1e-5, atol=1e-5)


@loop_over("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_memory_of_every_type_returns_the_written_values(dtype: torch.dtype) -> None:
    """bfloat16 rounds to 8 bits, int8 to a step of the largest value in a head over 127; a head of zeros stays zero."""
    torch.manual_seed(0)
    attention = replace(shape(num_heads=2), kv_cache_dtype=dtype)
    tables, cache = Tables(num_blocks=4, block_size=4), reference.ReferenceAttention(attention).allocate(4, 4)
    step = pack(tables, [(0, 0, 1)])
    key, value = torch.randn(1, 2, 8) * 50, torch.randn(1, 2, 8) * 50
    value[0, 1] = 0.0
    reference.write_kv(key, value, cache, step.metadata.slot_mapping)
    out = reference.paged_attention(torch.randn(1, 2, 8), cache, step.metadata, 1.0, None)
    step_size = value.abs().amax(-1, keepdim=True) / 127
    bound = {torch.float32: torch.zeros(()), torch.bfloat16: value.abs() / 256, torch.int8: step_size / 2}[dtype]
    assert ((out - value).abs() <= bound * 1.001 + 1e-6).all()
    assert torch.equal(out[0, 1], torch.zeros(8))
    assert cache.key.dtype == dtype


def test_int8_memory_has_a_scale_for_each_token_and_head() -> None:
    x = torch.tensor([[[127.0, -3.4], [0.0, 0.0]], [[1.0, 0.5], [-2.54, 0.02]]])
    quantized, scale = reference.quantize_kv(x)
    assert quantized.tolist() == [[[127, -3], [0, 0]], [[127, 64], [-127, 1]]]
    torch.testing.assert_close(scale, torch.tensor([[1.0, 0.0], [1 / 127, 0.02]]))


def swigluoai(gate: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=7)
    return gate * torch.sigmoid(1.702 * gate)


XIELU = (0.4, -0.3, 0.5, -1e-6)


def xielu(x: torch.Tensor, *parameters: float) -> torch.Tensor:
    alpha_p, alpha_n, beta, eps = torch.tensor(parameters, dtype=torch.float64)
    x64, alpha_n = x.double(), beta + F.softplus(alpha_n)
    below = alpha_n * torch.expm1(torch.minimum(x64, eps)) - alpha_n * x64 + beta * x64
    return torch.where(x64 > 0, F.softplus(alpha_p) * x64**2 + beta * x64, below).to(x.dtype)


@loop_over("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_activation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 24, dtype=dtype) * 5
    weight, bias = torch.randn(24, dtype=dtype), torch.randn(24, dtype=dtype)
    close = partial(torch.testing.assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    close(reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, (24,), weight, 1e-5))
    expected = F.layer_norm(x, (24,), weight, bias, 1e-5)
    close(reference.layer_norm(x, weight, bias, 1e-5), expected)
    close(reference.activate(x, "silu_and_mul"), F.silu(x[:, :12]) * x[:, 12:])
    prologues = {
        NO_PROLOGUE: x,
        Prologue("relu"): F.relu(x),
        Prologue("relu2"): F.relu(x) ** 2,
        Prologue("silu_and_mul"): F.silu(x[:, :12]) * x[:, 12:],
        Prologue("swigluoai_and_mul"): swigluoai(x[:, :12]) * (x[:, 12:].clamp(-7, 7) + 1),
        Prologue("gelu"): F.gelu(x),
        Prologue("gelu_and_mul", parameters=(0.7,)): F.gelu(0.7 * x[:, :12]) * x[:, 12:],
        Prologue("xielu", parameters=XIELU): xielu(x, *XIELU),
        Prologue("gelu_tanh_and_mul"): F.gelu(x[:, :12], approximate="tanh") * x[:, 12:],
        Prologue("rms_norm", weight, eps=1e-5): F.rms_norm(x, (24,), weight, 1e-5),
        Prologue("layer_norm", weight, bias, 1e-5): expected,
    }
    for prologue, applied in prologues.items():
        close(reference.apply_prologue(x, prologue), applied)


def test_linear_and_embedding() -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(7, 5), torch.randn(7)
    torch.testing.assert_close(reference.linear(x, weight, None), F.linear(x, weight))
    torch.testing.assert_close(reference.linear(x, weight, bias), F.linear(x, weight, bias))
    ids = torch.tensor([6, 0, 6])
    assert torch.equal(reference.embedding(ids, weight), torch.stack((weight[6], weight[0], weight[6])))
