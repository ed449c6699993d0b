"""Mixtures of experts: fast kernels equal the reference, and the result of a row does not depend on other rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from chairlift.kernels.activations import GateActivation, activation_kernel
from chairlift.kernels.cpu import load
from chairlift.kernels.grouped_mixture import route
from chairlift.kernels.interface import NO_PROLOGUE, Kernels, LoadedMatrix, Mixture, MixtureKernel, Prologue
from chairlift.kernels.kernel_set import get_kernels
from chairlift.kernels.routing import ExpertRouting
from chairlift.kernels.weights import PackedRows, Weights, packed_tensor
from support.case_loop import loop_over
from support.native import needs_native
from support.reference_kernels import REFERENCE

KERNEL_SETS = ["torch", pytest.param("native", marks=needs_native)]
SIZE, INNER = 40, 24


class RandomExperts:
    """A `Weights` with random matrices, the same for the same name and shape; each is rounded to a native format."""

    def __init__(self, weight_format: str | None = None) -> None:
        self._format = weight_format

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(name) * 31 + sum(name.encode()))
        tensor = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if self._format is None or len(shape) == 1 or name.startswith("router"):
            return tensor
        matrix = load().PackedMatrix(self._format, *shape)
        matrix.pack_floats(0, tensor.numpy())
        return torch.from_numpy(matrix.unpack(0, shape[0]))

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        return packed_tensor(self.tensor(name, shape))


def make_mixture(
    kernels: Kernels,
    weights: Weights,
    routing: ExpertRouting,
    *,
    num_experts: int = 6,
    has_bias: bool = False,
    norm: Prologue = NO_PROLOGUE,
    activation: str = "silu_and_mul",
    router_norm: Prologue | None = None,
    has_scales: bool = False,
    has_selection_bias: bool = False,
    routed_size: int = SIZE,
) -> MixtureKernel:
    def matrix(name: str, out: int, size: int) -> LoadedMatrix:
        bias = weights.tensor(f"{name}.bias", (out,)) if has_bias else None
        if name == "router":
            return LoadedMatrix(kernels.load_router(weights, [(name, out)], size), bias)
        return LoadedMatrix(kernels.load_matrix(weights, [(name, out)], size), bias)

    experts = ((matrix(f"{i}.up", 2 * INNER, SIZE), matrix(f"{i}.down", SIZE, INNER)) for i in range(num_experts))
    scales = weights.tensor("scales", (num_experts,)) if has_scales else None
    router = matrix("router", num_experts, routed_size)
    bias = weights.tensor("selection", (num_experts,)) if has_selection_bias else None
    return kernels.make_mixture(Mixture(norm, router, experts, activation, routing, router_norm, scales, bias))


ROUTINGS = [ExpertRouting(1, "all"), ExpertRouting(2, "chosen"), ExpertRouting(3, "all"), ExpertRouting(6, "chosen")]
RMS_NORM = Prologue("rms_norm", torch.linspace(0.5, 2, SIZE), eps=1e-5)
LAYER_NORM = Prologue("layer_norm", torch.linspace(0.5, 2, SIZE), torch.linspace(-1, 1, SIZE), 1e-5)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@loop_over("routing", ROUTINGS)
@loop_over("norm", [NO_PROLOGUE, RMS_NORM, LAYER_NORM])
@loop_over(("has_bias", "activation"), [(False, "silu_and_mul"), (True, "swigluoai_and_mul")])
def test_mixtures_equal_the_reference(
    kernels: str, routing: ExpertRouting, norm: Prologue, has_bias: bool, activation: str
) -> None:
    fast, slow = (
        make_mixture(each, RandomExperts(), routing, has_bias=has_bias, norm=norm, activation=activation)
        for each in (get_kernels(kernels), REFERENCE)
    )
    for num_rows in (1, 2, 9, 70):
        x = torch.randn(num_rows, SIZE + 3, generator=torch.Generator().manual_seed(num_rows))[:, 3:]
        torch.testing.assert_close(fast(x), slow(x.clone()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@loop_over("routing", ROUTINGS)
@loop_over("norm", [NO_PROLOGUE, RMS_NORM])
def test_norms_of_routers_and_scales_of_experts(kernels: str, routing: ExpertRouting, norm: Prologue) -> None:
    options: dict[str, Any] = {"norm": norm, "router_norm": LAYER_NORM, "has_scales": True}
    fast, slow = (make_mixture(each, RandomExperts(), routing, **options) for each in (get_kernels(kernels), REFERENCE))
    x = torch.randn(70, SIZE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fast(x), slow(x.clone()), rtol=1e-4, atol=1e-4)


DIVISORS: list[dict[str, float]] = [{}, {"sum_eps": 0.3}, {"sum_min": 0.9}]


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@loop_over(("softmax", "has_sigmoid", "divisor"), product(("all", "chosen"), (False, True), DIVISORS))
@loop_over(("num_groups", "has_bias", "has_scales"), product((1, 3), (False, True), (False, True)))
def test_all_combinations_of_routing_equal_the_reference(
    kernels: str,
    softmax: Any,
    has_sigmoid: bool,
    divisor: dict[str, float],
    num_groups: int,
    has_bias: bool,
    has_scales: bool,
) -> None:
    routing = ExpertRouting(2, softmax, has_sigmoid, **divisor, scale=2.5, num_groups=num_groups)
    options: dict[str, Any] = {"has_selection_bias": has_bias, "has_scales": has_scales}
    fast, slow = (make_mixture(each, RandomExperts(), routing, **options) for each in (get_kernels(kernels), REFERENCE))
    x = torch.randn(20, SIZE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fast(x), slow(x.clone()), rtol=1e-4, atol=1e-4)


def test_what_changes_the_choice_and_the_weights() -> None:
    x = torch.randn(20, SIZE, generator=torch.Generator().manual_seed(0))
    for has_sigmoid in (False, True):
        routing = ExpertRouting(2, "chosen", has_sigmoid)
        others = ({"num_groups": 3}, {"sum_eps": 0.3}, {"sum_min": 0.9}, {"scale": 2.0}, {"softmax": "all"})
        options: dict[str, Any] = {"has_selection_bias": True}
        plain = make_mixture(REFERENCE, RandomExperts(), routing, **options)(x.clone())
        for other in others:
            changed = make_mixture(REFERENCE, RandomExperts(), replace(routing, **other), **options)
            assert not torch.allclose(plain, changed(x.clone())), other
        assert not torch.allclose(plain, make_mixture(REFERENCE, RandomExperts(), routing)(x.clone()))


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_a_router_that_reads_rows_of_another_width(kernels: str) -> None:
    norm = Prologue("rms_norm", torch.linspace(0.5, 2, 2 * SIZE), eps=1e-5)
    options: dict[str, Any] = {"routed_size": 2 * SIZE, "router_norm": norm}
    fast, slow = (
        make_mixture(each, RandomExperts(), ROUTINGS[1], **options) for each in (get_kernels(kernels), REFERENCE)
    )
    for num_rows in (1, 9, 70):
        draw = torch.Generator().manual_seed(num_rows)
        x, routed = (torch.randn(num_rows, size + 3, generator=draw)[:, 3:] for size in (SIZE, 2 * SIZE))
        torch.testing.assert_close(fast(x, routed), slow(x.clone(), routed), rtol=1e-4, atol=1e-4)


def test_the_score_of_a_group_is_that_of_its_best_expert_or_with_sigmoids_of_its_best_two() -> None:
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0, 1.0, -5.0]])
    routing = ExpertRouting(2, "all", num_groups=3, groups_per_token=1)
    experts, weights = route(logits, routing)
    assert experts.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, :2])
    experts, weights = route(logits, replace(routing, has_sigmoid=True))
    assert experts.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, 2:4])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 2.0])
    experts, weights = route(logits, replace(routing, has_sigmoid=True), None, bias)
    assert experts.tolist() == [[5, 4]]


def test_a_bias_changes_the_choice_but_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([-1.0, 0.0, 0.0, 1.0])
    experts, weights = route(logits, ExpertRouting(2, "all", has_sigmoid=True, scale=2.0), None, bias)
    assert experts.tolist() == [[3, 1]]
    torch.testing.assert_close(weights, 2 * torch.tensor([[-1.0, 1.0]]).sigmoid())
    _, shares = route(logits, ExpertRouting(2, "chosen", has_sigmoid=True, sum_eps=0.5), None, bias)
    torch.testing.assert_close(shares, weights / 2 / (weights.sum() / 2 + 0.5))


@pytest.mark.parametrize("kernels", ["reference", *KERNEL_SETS])
@loop_over(("num_gates", "activation"), product((1, 4, SIZE), ("sigmoid", "softplus")))
def test_gates_multiply_consecutive_values(kernels: str, num_gates: int, activation: GateActivation) -> None:
    rows, logits = torch.randn(5, SIZE), 12 * torch.randn(5, num_gates)
    factors = 1 / (1 + (-logits).exp()) if activation == "sigmoid" else logits.double().exp().log1p().float()
    expected = (rows.view(5, num_gates, -1) * factors[..., None]).flatten(1)
    torch.testing.assert_close(get_kernels(kernels).gate(rows.clone(), logits, activation), expected)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_an_activation_without_a_native_form(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.kernels import activations

    monkeypatch.setitem(activations.ACTIVATIONS, "cube", activations.Activation(lambda x: x**3))
    options: dict[str, Any] = {"activation": activation_kernel("cube", True), "norm": RMS_NORM}
    fast, slow = (
        make_mixture(each, RandomExperts(), ROUTINGS[1], **options) for each in (get_kernels(kernels), REFERENCE)
    )
    x = torch.randn(9, SIZE)
    torch.testing.assert_close(fast(x), slow(x.clone()), rtol=1e-4, atol=1e-4)


@needs_native
@loop_over("weight_format", ["int8", "q8_0", "q4_0", "q4_1"])
def test_quantized_experts_are_close_to_the_reference(weight_format: str) -> None:
    """The router is not quantized, so both kernel sets choose the same experts."""
    fast = make_mixture(get_kernels("native", weight_format), RandomExperts(weight_format), ROUTINGS[1], norm=RMS_NORM)
    slow = make_mixture(REFERENCE, RandomExperts(weight_format), ROUTINGS[1], norm=RMS_NORM)
    x = torch.randn(70, SIZE)
    error = (fast(x) - slow(x)).square().mean().sqrt() / slow(x).square().mean().sqrt()
    assert float(error) < 0.03


@pytest.fixture
def restored_threads() -> Iterator[None]:
    native = load()
    isa, num_threads = native.isa(), native.num_threads()
    yield
    native.set_isa(isa)
    native.set_num_threads(num_threads)
    native.set_tile_order(0)


@needs_native
@loop_over("weight_format", [None, "int8", "q8_0", "q4_1"])
@pytest.mark.usefixtures("restored_threads")
def test_rows_do_not_depend_on_other_rows_threads_or_order(weight_format: str | None) -> None:
    native = load()
    for isa in native.available_isas():
        native.set_isa(isa)
        mixture = make_mixture(
            get_kernels("native", weight_format), RandomExperts(weight_format), ROUTINGS[2], norm=RMS_NORM
        )
        x = torch.randn(70, SIZE)
        together = mixture(x).clone()
        for seed in range(1, 4):
            native.set_num_threads(seed)
            native.set_tile_order(seed)
            assert torch.equal(torch.cat([mixture(x[i : i + 1]).clone() for i in range(70)]), together)
            order = torch.randperm(70)
            assert torch.equal(mixture(x[order]), together[order])
            assert torch.equal(mixture(x[:9]), together[:9])


@loop_over("softmax", ["all", "chosen"])
def test_routing_takes_the_largest_logits_and_of_equal_ones_the_first(softmax: Any) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.5, 0.5, 0.5, 0.5]])
    experts, weights = route(logits, ExpertRouting(2, softmax))
    assert experts.tolist() == [[1, 2], [0, 1]]
    every = torch.softmax(logits, dim=-1).gather(1, experts)
    expected = every if softmax == "all" else every / every.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)


@needs_native
@loop_over("softmax", ["all", "chosen"])
def test_native_routing_chooses_the_first_of_equal_logits(softmax: Any) -> None:
    class EqualLogits(RandomExperts):
        def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return torch.zeros(shape) if name.startswith("router") else super().tensor(name, shape)

    x = torch.randn(3, SIZE)
    native, slow = (
        make_mixture(kernels, EqualLogits(), ExpertRouting(2, softmax))
        for kernels in (get_kernels("native"), REFERENCE)
    )
    torch.testing.assert_close(native(x), slow(x), rtol=1e-4, atol=1e-4)


@needs_native
def test_layers_that_do_not_fit_are_rejected() -> None:
    native = load()

    def layer(out: int, size: int, prologue: str = "none") -> Any:
        return native.FusedLinear([native.PackedMatrix("f32", out, size)], None, prologue)

    router, up, down = layer(2, 8), layer(12, 8), layer(8, 6, "silu_and_mul")
    native.ExpertMixture(router, [up, up], [down, down], 2, True)
    with pytest.raises(ValueError, match="one output for each expert"):
        native.ExpertMixture(router, [up], [down], 1, True)
    with pytest.raises(ValueError, match="expert_scales must have one value for each expert"):
        native.ExpertMixture(router, [up, up], [down, down], 2, True, expert_scales=torch.ones(3).numpy())
    with pytest.raises(ValueError, match="selection_bias must have one value for each expert"):
        native.ExpertMixture(router, [up, up], [down, down], 2, True, selection_bias=torch.ones(1).numpy())
    with pytest.raises(ValueError, match="as many layers"):
        native.ExpertMixture(router, [up, up], [down], 1, True)
    with pytest.raises(ValueError, match="experts_per_token must be from 1 to 2, got 3"):
        native.ExpertMixture(router, [up, up], [down, down], 3, True)
    for wrong_up, wrong_down in ((layer(12, 9), down), (layer(14, 8), down), (up, layer(8, 12, "silu_and_mul"))):
        with pytest.raises(ValueError, match="equal input, inner and output sizes"):
            native.ExpertMixture(router, [up, wrong_up], [down, wrong_down], 1, True)
    with pytest.raises(ValueError, match="norm_weight must have in_features"):
        native.FusedLinear(
            [native.PackedMatrix("f32", 4, 4)], None, native.Norm("rms_norm", torch.ones(5).numpy(), None, 1e-5)
        )
