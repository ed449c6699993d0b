from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from chairlift.kernels.activations import ACTIVATIONS, GATED_SUFFIX, GateActivation
from chairlift.kernels.interface import NO_PROLOGUE, ComposedResidualSum, Prologue
from chairlift.kernels.triton import rows
from support.case_loop import loop_over
from support.reference_kernels import apply_prologue, gate

XIELU = (0.8, 0.7, 0.5, -1e-6)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = [*ACTIVATIONS, *(name + GATED_SUFFIX for name in ACTIVATIONS if name != "xielu")]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def norm(kind: str, size: int, dtype: torch.dtype = torch.float32) -> Prologue:
    if kind == "none":
        return NO_PROLOGUE
    bias = normal(size, dtype=dtype, seed=2) if kind == "layer_norm" else None
    return Prologue(kind, normal(size, dtype=dtype, seed=1), bias, 1e-5)


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """The result is float32, rounded once: the interpreter cuts bits off where compiled code rounds."""
    error = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[found.dtype]
    torch.testing.assert_close(found.float(), exact, rtol=error, atol=1e-5)


def assert_rows_alone(kernel: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Each row has the same bits alone and in batches of other rows in another order."""
    whole = kernel(x.clone())
    for row in range(len(x)):
        assert torch.equal(kernel(x[row : row + 1].clone())[0], whole[row])
    for seed in range(5):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: 1 + seed]
        assert torch.equal(kernel(x[order].clone()), whole[order])


@loop_over("size", [1, 24, 200, 2880])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_their_definition(dtype: torch.dtype, kind: str, size: int) -> None:
    x, prologue = normal(3, size, dtype=dtype), norm(kind, size, dtype)
    assert_rounded(rows.make_prologue(prologue)(x), apply_prologue(x.float(), prologue))


@loop_over("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_their_definition(dtype: torch.dtype, kind: str) -> None:
    parameters = XIELU if kind == "xielu" else (0.7,) if kind.endswith(GATED_SUFFIX) else ()
    prologue, x = Prologue(kind, parameters=parameters), 2 * normal(3, 2400, dtype=dtype)
    exact = apply_prologue(x.float(), prologue)
    if dtype == torch.float16:
        exact = exact.half().float()  # Squares overflow.
    assert_rounded(rows.make_prologue(prologue)(x), exact)


@loop_over("activation", ["sigmoid", "softplus"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_their_definition(dtype: torch.dtype, activation: GateActivation) -> None:
    for size, num_gates in ((1200, 1200), (1200, 12), (5, 1)):
        x, logits = normal(3, size, dtype=dtype), 9 * normal(3, num_gates, dtype=dtype, seed=1)
        exact = gate(x.float(), logits.float(), activation)
        assert_rounded(rows.gate(x, logits, activation), exact)


def test_a_small_softplus_has_relative_precision() -> None:
    logits = torch.linspace(-40, 40, 1001)[None]
    found = rows.gate(torch.ones(1, 1001), logits, "softplus")
    torch.testing.assert_close(found, logits.double().exp().log1p().float(), rtol=1e-6, atol=0.0)


def sum_kernels(
    after: str, of_sum: str, multiplier: float, scale: float, size: int
) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    prologues = norm(after, size), norm(of_sum, size)
    found = rows.make_residual_sum(*prologues, multiplier, scale)

    def make(prologue: Prologue) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: apply_prologue(x, prologue)

    return found, ComposedResidualSum(*prologues, multiplier, scale, make_prologue=make)


@loop_over("of_sum", ["none", "rms_norm", "layer_norm"])
@pytest.mark.parametrize("after", ["none", "rms_norm", "layer_norm"])
def test_sums_of_residuals_are_their_definition(after: str, of_sum: str) -> None:
    for dtype, multiplier, scale in ((torch.float32, 0.3, 1.0), (torch.bfloat16, 1.0, 1.7)):
        stream, branch = normal(3, 200, dtype=dtype), normal(3, 200, dtype=dtype, seed=1)
        found, defined = sum_kernels(after, of_sum, multiplier, scale, 200)
        exact = defined(stream.float().clone(), branch.float())
        assert_rounded(found(stream.clone(), branch), exact)
        alone = defined(stream.float().clone(), None)
        assert_rounded(found(stream.clone(), None), alone)


def test_parts_of_rows_are_read_where_they_are() -> None:
    """A row may be a part of a longer one, at a multiple of 16 bytes or not."""
    x = normal(3, 96)
    for start in (0, 4, 5):
        part, prologue = x[:, start : start + 48], norm("rms_norm", 48)
        exact = apply_prologue(part, prologue)
        assert_rounded(rows.make_prologue(prologue)(part), exact)
        gated = Prologue("silu_and_mul")
        assert_rounded(rows.make_prologue(gated)(part), apply_prologue(part, gated))


def test_parameters_may_lie_anywhere() -> None:
    x, weight = normal(3, 48), normal(1, 49)[0, 1:]
    prologue = Prologue("rms_norm", weight, eps=1e-5)
    exact = apply_prologue(x, prologue)
    assert_rounded(rows.make_prologue(prologue)(x), exact)
    assert_rounded(rows.make_residual_sum(prologue, NO_PROLOGUE)(x.clone(), x), x + exact)


def test_bits_of_a_row_do_not_depend_on_its_batch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = normal(6, 2880, dtype=dtype)
        for kind in ("rms_norm", "layer_norm"):
            assert_rows_alone(rows.make_prologue(norm(kind, 2880)), x)
        assert_rows_alone(rows.make_prologue(Prologue("silu_and_mul")), x)
        assert_rows_alone(lambda x: rows.gate(x, 2 * x, "sigmoid"), x)
        assert_rows_alone(lambda x: sum_kernels("rms_norm", "rms_norm", 0.5, 2.0, 2880)[0](x, 3 * x), x)


def test_no_rows_have_no_result_and_unknown_activations_are_rejected() -> None:
    assert rows.make_prologue(norm("rms_norm", 24))(normal(0, 24)).shape == (0, 24)
    with pytest.raises(KeyError):
        rows.make_prologue(Prologue("sine_and_mul"))
