"""Norms, activation functions, gates and sums of residuals: one launch for each, whose programs own whole rows.

All of them compute in float32 and round once. The tree of a sum depends on the size of a row alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from math import exp, log1p
from typing import Any

import torch
import triton
import triton.language as tl

from chairlift.kernels.activations import (
    GATED_SUFFIX,
    SWIGLUOAI_ALPHA,
    SWIGLUOAI_LIMIT,
    GateActivation,
    find_activation,
)
from chairlift.kernels.interface import NO_PROLOGUE, NORM_KINDS, Prologue, ResidualSumKernel, RowKernel
from chairlift.kernels.triton.launch import ALIGNMENT, Launch, pointer

VALUES_PER_THREAD = 16
COLUMNS = 1024
"""The columns of a program of an elementwise kernel."""


@triton.jit
def log1p_exp(x: tl.tensor) -> Any:
    """log(1 + e^x) by the series of atanh, since the logarithm of the hardware has no relative precision near 1."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    t = s * s
    series = 1.0 / 9 + t * (1.0 / 11 + t * (1.0 / 13 + t * (1.0 / 15)))
    series = 1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * (1.0 / 7 + t * series)))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def silu(x: tl.tensor) -> Any:
    """x * sigmoid(x)."""
    return x * tl.sigmoid(x)


@triton.jit
def _normed(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, columns: tl.tensor, mask: tl.tensor, KIND: tl.constexpr,
    SIZE: tl.constexpr, EPS: tl.constexpr,
) -> Any:  # fmt: skip
    """The norm of a row in float32, whose masked values are 0; x itself if the kind is "none"."""
    if KIND == "layer_norm":
        x = tl.where(mask, x - tl.sum(x, 0) / SIZE, 0.0)
    if KIND != "none":
        x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + EPS)
        x = x * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if KIND == "layer_norm":
        x = x + tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _sum_rows(
    stream: tl.tensor, branch: tl.tensor, after_weight: tl.tensor, after_bias: tl.tensor, sum_weight: tl.tensor,
    sum_bias: tl.tensor, out: tl.tensor, AFTER: tl.constexpr, AFTER_EPS: tl.constexpr, OF_SUM: tl.constexpr,
    SUM_EPS: tl.constexpr, HAS_BRANCH: tl.constexpr, MULTIPLIER: tl.constexpr, SCALE: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, BRANCH_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """SCALE * of_sum(stream + MULTIPLIER * after(branch)) of one row; `out` may be the stream."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    total = tl.load(stream + row * STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        added = tl.load(branch + row * BRANCH_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        total += MULTIPLIER * _normed(added, after_weight, after_bias, columns, mask, AFTER, SIZE, AFTER_EPS)
    total = SCALE * _normed(total, sum_weight, sum_bias, columns, mask, OF_SUM, SIZE, SUM_EPS)
    tl.store(out + row * OUT_STRIDE + columns, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _activated(
    x: tl.tensor, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
) -> Any:  # fmt: skip
    """An activation function in float32; P0 to P3 are the constants of "swigluoai" and "xielu"."""
    if KIND == "silu":
        x = silu(x)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "relu":
        x = tl.maximum(x, 0.0)
    elif KIND == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif KIND == "swigluoai":
        x = tl.minimum(x, P1)
        x = x * tl.sigmoid(P0 * x)
    elif KIND == "xielu":
        below = (tl.exp(tl.minimum(x, P3)) - 1.0 - x) * P1
        x = tl.where(x > 0, P0 * x * x, below) + P2 * x
    return x


@triton.jit
def _activate_rows(
    x: tl.tensor, out: tl.tensor, KIND: tl.constexpr, IS_GATED: tl.constexpr, FACTOR: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    values = tl.load(x + row * STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
    values = _activated(FACTOR * values, KIND, P0, P1, P2, P3)
    if IS_GATED:
        up = tl.load(x + row * STRIDE + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
        if KIND == "swigluoai":
            up = tl.clamp(up, -P1, P1) + 1.0
        values *= up
    tl.store(out + row * SIZE + columns, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gate_rows(
    x: tl.tensor, logits: tl.tensor, IS_SIGMOID: tl.constexpr, SIZE: tl.constexpr, SHARED: tl.constexpr,
    STRIDE: tl.constexpr, LOGIT_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    factors = tl.load(logits + row * LOGIT_STRIDE + columns // SHARED, mask=mask, other=0.0).to(tl.float32)
    factors = tl.sigmoid(factors) if IS_SIGMOID else log1p_exp(factors)
    values = tl.load(x + row * STRIDE + columns, mask=mask, other=0.0).to(tl.float32) * factors
    tl.store(x + row * STRIDE + columns, values.to(x.dtype.element_ty), mask=mask)


def row_block(size: int) -> tuple[int, int]:
    """The block of a program that owns a row, and its number of warps."""
    block = triton.next_power_of_2(size)
    return block, min(max(block // (32 * VALUES_PER_THREAD), 1), 16)


@cache
def sum_launch(
    norms: tuple[str, float, str, float],
    factors: tuple[float, float],
    size: int,
    strides: tuple[int, int, int],
    types: tuple[torch.dtype, ...],
) -> Launch:
    """Args: kind and epsilon of the norm of the branch and of the sum; multiplier and scale; the distances of rows of
    the stream, the branch (-1 without one) and the result; the types of the stream, the branch, and the parameters
    of both norms."""
    block, num_warps = row_block(size)
    constants = dict(zip(("AFTER", "AFTER_EPS", "OF_SUM", "SUM_EPS"), norms, strict=True))
    constants |= {"HAS_BRANCH": strides[1] >= 0, "MULTIPLIER": factors[0], "SCALE": factors[1], "BLOCK": block}
    constants |= {"SIZE": size, "STRIDE": strides[0], "BRANCH_STRIDE": strides[1], "OUT_STRIDE": strides[2]}
    stream, branch, after_type, sum_type = map(pointer, types)
    pointers = (stream, branch, after_type, after_type, sum_type, sum_type, stream)
    return Launch(_sum_rows, constants, pointers, num_warps)


@cache
def activation_launch(kind: str, parameters: tuple[float, ...], size: int, stride: int, x: torch.dtype) -> Launch:
    """Args: kind and parameters of a `Prologue`; size: the width of the result."""
    _, is_gated = find_activation(kind)
    name = kind.removesuffix(GATED_SUFFIX) if is_gated else kind
    values = (0.0,) * 4
    if name == "swigluoai":
        values = (SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT, 0.0, 0.0)
    elif name == "xielu":
        alpha_p, alpha_n, beta, eps = parameters
        values = (log1p(exp(alpha_p)), beta + log1p(exp(alpha_n)), beta, eps)
    constants: dict[str, Any] = {"KIND": name, "IS_GATED": is_gated, "SIZE": size, "STRIDE": stride, "BLOCK": COLUMNS}
    constants["FACTOR"] = parameters[0] if is_gated and parameters else 1.0
    constants |= {f"P{i}": value for i, value in enumerate(values)}
    return Launch(_activate_rows, constants, (pointer(x), pointer(x)))


@cache
def gate_launch(
    activation: GateActivation, size: int, num_gates: int, strides: tuple[int, int], x: torch.dtype, logits: torch.dtype
) -> Launch:
    """Args: strides: the distances of rows of x and of the logits; x, logits: their types."""
    constants = {"IS_SIGMOID": activation == "sigmoid", "SIZE": size, "SHARED": size // num_gates, "BLOCK": COLUMNS}
    constants |= {"STRIDE": strides[0], "LOGIT_STRIDE": strides[1]}
    return Launch(_gate_rows, constants, (pointer(x), pointer(logits)))


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows [T, n] that a kernel can read: each is contiguous, and the first one begins at a multiple of ALIGNMENT."""
    return x if x.stride(1) == 1 and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def make_prologue(prologue: Prologue) -> RowKernel:
    """The function of rows [T, n] that computes a prologue in one launch."""
    if prologue.kind == "none":
        return lambda x: x
    if prologue.kind in NORM_KINDS:
        return partial(_norm, _align(prologue))
    find_activation(prologue.kind)
    return partial(_activate, prologue)


def _norm(prologue: Prologue, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _sum(NO_PROLOGUE, prologue, (1.0, 1.0), aligned_rows(x), None, out)


def _activate(prologue: Prologue, x: torch.Tensor) -> torch.Tensor:
    x, is_gated = aligned_rows(x), prologue.kind.endswith(GATED_SUFFIX)
    size = x.shape[1] // 2 if is_gated else x.shape[1]
    out = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
    launch = activation_launch(prologue.kind, prologue.parameters, size, x.stride(0), x.dtype)
    launch((len(x), triton.cdiv(size, COLUMNS)), x, out)
    return out


def _align(norm: Prologue) -> Prologue:
    """The norm with aligned parameters: those of a file in the memory of the host may lie anywhere."""
    weight, bias = (None if each is None else aligned_rows(each[None])[0] for each in (norm.weight, norm.bias))
    return replace(norm, weight=weight, bias=bias)


def _parameters(norm: Prologue, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of a norm; those that it lacks are other tensors, which are not read."""
    weight = x if norm.weight is None else norm.weight
    return weight, weight if norm.bias is None else norm.bias


def _sum(
    after: Prologue,
    of_sum: Prologue,
    factors: tuple[float, float],
    x: torch.Tensor,
    y: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the sum of stream x and branch y to `out`."""
    branch, parameters = x if y is None else y, (*_parameters(after, x), *_parameters(of_sum, x))
    launch = sum_launch(
        (after.kind, after.eps, of_sum.kind, of_sum.eps),
        factors,
        x.shape[1],
        (x.stride(0), -1 if y is None else y.stride(0), out.stride(0)),
        (x.dtype, branch.dtype, parameters[0].dtype, parameters[2].dtype),
    )
    launch((len(x),), x, branch, *parameters, out)
    return out


def make_residual_sum(
    after: Prologue, of_sum: Prologue, multiplier: float = 1.0, scale: float = 1.0
) -> ResidualSumKernel:
    """The sum of stream and branch [T, n] with its norms in one launch, in the memory of the stream."""
    after, of_sum = _align(after), _align(of_sum)

    def add(stream: torch.Tensor, branch: torch.Tensor | None) -> torch.Tensor:
        if branch is None and of_sum.kind == "none" and scale == 1:
            return stream
        x = aligned_rows(stream)
        return _sum(after, of_sum, (multiplier, scale), x, None if branch is None else aligned_rows(branch), x)

    return add


def gate(x: torch.Tensor, logits: torch.Tensor, activation: GateActivation) -> torch.Tensor:
    """Compute `Kernels.gate` in the memory of x."""
    x, logits = aligned_rows(x), aligned_rows(logits)
    (num_rows, size), strides = x.shape, (x.stride(0), logits.stride(0))
    launch = gate_launch(activation, size, logits.shape[1], strides, x.dtype, logits.dtype)
    launch((num_rows, triton.cdiv(size, COLUMNS)), x, logits)
    return x


def variants() -> Iterator[tuple[str, Launch]]:
    """The launches for typical models in bfloat16."""
    bf16, f32 = torch.bfloat16, torch.float32
    one, norm = ("none", 0.0), ("rms_norm", 1e-6)
    for size in (1024, 2880, 4096, 8192, 16384):
        yield f"rms_norm_{size}", sum_launch((*one, *norm), (1.0, 1.0), size, (size, -1, size), (bf16,) * 4)
    sizes = (5376, 5376, 5376)
    for name, norms in (("sum", (*one, *one)), ("sum_after", (*norm, *one)), ("sum_after_of_sum", (*norm, *norm))):
        yield f"{name}_5376", sum_launch(norms, (1.0, 0.5), 5376, sizes, (bf16, bf16, f32, f32))
    yield "layer_norm_5376", sum_launch((*one, "layer_norm", 1e-5), (1.0, 1.0), 5376, sizes, (bf16,) * 4)
    for kind in ("silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul", "swigluoai_and_mul", "relu2"):
        yield kind, activation_launch(kind, (), 14336, 28672 if kind.endswith(GATED_SUFFIX) else 14336, bf16)
    yield "xielu", activation_launch("xielu", (0.8, 0.8, 0.5, -1e-6), 21504, 21504, bf16)
    yield "gate_sigmoid", gate_launch("sigmoid", 4096, 4096, (4096, 4096), bf16, bf16)
    yield "gate_softplus", gate_launch("softplus", 4096, 32, (4096, 32), bf16, bf16)
