"""LayerBuilder: loads the parameters of layers as kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from chairlift.kernels.activations import GateActivation
from chairlift.kernels.attention import AttentionShape, QKNorm
from chairlift.kernels.grouped_mixture import GroupedMixture
from chairlift.kernels.interface import (
    NO_PROLOGUE,
    FeedForwardKernel,
    Kernels,
    LinearKernel,
    LoadedMatrix,
    Mixture,
    MixtureKernel,
    Prologue,
    ResidualSumKernel,
    RowKernel,
)
from chairlift.kernels.lora import LoraAdapters
from chairlift.kernels.recurrence import Convolution, GatedDelta, Mamba2, Recurrence, RecurrentKernel, ShortConvolution
from chairlift.kernels.recurrence_sizes import GatedDeltaSizes, Mamba2Sizes, sizes_of
from chairlift.kernels.weights import Weights
from chairlift.models.declaration.attention_spec import AttentionSpec
from chairlift.models.declaration.feed_forward_spec import FeedForwardSpec
from chairlift.models.declaration.layer_spec import BranchNorms
from chairlift.models.declaration.matrix_spec import MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ModelConfig, PositionTableSpec
from chairlift.models.declaration.recurrence_spec import GatedDeltaSpec, RecurrenceSpec


class BranchSum:
    """The sum of the residual stream and a branch, which the last product of the branch computes where it can.

    Args:
        kernel: None if nothing remains to be done after that product.
        is_fused: whether the product adds the stream, because no norm and no factor precede the sum.
    """

    def __init__(self, kernel: ResidualSumKernel | None, is_fused: bool) -> None:
        self._kernel = kernel
        self._is_fused = is_fused

    def residual(self, stream: torch.Tensor) -> torch.Tensor | None:
        """The residual that the last product of the branch adds, or None."""
        return stream if self._is_fused else None

    def __call__(self, stream: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """The sum; `branch` is the result of the last product, with its residual. The values of both are lost."""
        if self._kernel is None:
            return branch
        return self._kernel(branch, None) if self._is_fused else self._kernel(stream, branch)


class LayerBuilder:
    """Builds the parts of layers from their declarations.

    Args:
        backends: the backend of each attention shape.
        lora: the adapters of the layers; None if the model has none.

    Attributes:
        new_rows, call_each: as in `Kernels`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        backends: dict[AttentionShape, Any],
        lora: LoraAdapters | None = None,
    ) -> None:
        self.weights = weights
        self.backends = backends
        self.ropes = list(config.ropes)
        self._kernels = kernels
        self.new_rows, self.call_each = kernels.new_rows, kernels.call_each
        self._lora = lora
        self.waits_for_host = False
        self._loaded_norms: set[str] = set()

    def linear(self, spec: MatrixSpec, prologue: Prologue = NO_PROLOGUE) -> LinearKernel:
        """Load matrices with the same input, and their biases, as one product: [T, in] -> [T, out_features]."""
        loaded = self._load(spec)
        return self._kernels.make_linear(loaded.matrix, loaded.bias, prologue)

    def adapted_linear(self, spec: MatrixSpec, prologue: Prologue = NO_PROLOGUE) -> LinearKernel:
        """Load a product as `linear` does, with the LoRA adapters of its matrices."""
        base = self.linear(spec, prologue)
        if self._lora is None:
            return base
        return self._kernels.add_lora(base, prologue, self._lora.layer(spec.parts, spec.in_features))

    def feed_forward(self, spec: FeedForwardSpec, norm: NormSpec | None) -> FeedForwardKernel:
        """Load the feed-forward network after `norm`."""
        if spec.router is not None:
            return partial(_without_residual, self.mixture(spec, norm))
        up = self.adapted_linear(spec.up, self.norm(norm))
        parameters = tuple(
            float(self._vector(value, 1)) if isinstance(value, str) else value for value in spec.parameters
        )
        down = self.adapted_linear(spec.down, Prologue(spec.activation_kernel, parameters=parameters))
        return self._kernels.make_feed_forward(up, down)

    def mixture(self, spec: FeedForwardSpec, norm: NormSpec | None) -> RowKernel:
        """Load the mixture of experts after `norm`."""
        assert spec.router is not None, "a mixture has a router"
        router, scales, bias = spec.router, spec.router.expert_scales, spec.router.selection_bias
        router_norm = router.norm if spec.latent is None else norm
        experts = ((self._load(up), self._load(down)) for up, down in spec.experts)
        loaded = Mixture(
            self.norm(norm) if spec.latent is None else NO_PROLOGUE,
            self._load(router.matrix),
            experts,
            spec.activation_kernel,
            router.routing,
            None if router_norm is None else self.norm(router_norm),
            None if scales is None else self._vector(scales, router.num_experts),
            None if bias is None else self._vector(bias, router.num_experts),
        )
        mixture = self._kernels.make_mixture(loaded)
        self.waits_for_host |= isinstance(mixture, GroupedMixture)
        if spec.latent is None:
            return mixture
        first, last = spec.latent
        return partial(
            _in_latent_space, self.adapted_linear(first, self.norm(norm)), mixture, self.adapted_linear(last)
        )

    def gate(
        self, spec: MatrixSpec, norm: NormSpec | None, activation: GateActivation = "sigmoid"
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Load the projection of a gate: rows [T, n], x [T, hidden_size] -> rows * activation(projection(norm(x))).

        Each value of the projection is the gate of as many consecutive values of a row. The values of `rows` are lost.
        """
        projection = self.adapted_linear(spec, self.norm(norm))
        return partial(_multiply_gate, self._kernels.gate, projection, activation)

    def _load(self, spec: MatrixSpec) -> LoadedMatrix:
        load = self._kernels.load_router if spec.keeps_format else self._kernels.load_matrix
        matrix = load(self.weights, spec.parts, spec.in_features)
        biases = [self.weights.tensor(f"{name}.bias", (out,)) for name, out in spec.parts] if spec.has_bias else []
        return LoadedMatrix(matrix, torch.cat(biases) if biases else None)

    def norm(self, norm: NormSpec | None) -> Prologue:
        """Load a norm as the prologue of a product."""
        if norm is None:
            return NO_PROLOGUE
        weight = self.norm_weight(norm.name, norm.size, norm.weight_offset)
        if norm.weight_multiplier != 1:
            weight = weight * norm.weight_multiplier
        bias = None
        if norm.kind == "layer_norm":
            bias = self.weights.tensor(f"{norm.name}.bias", (norm.size,)) if norm.has_bias else torch.zeros_like(weight)
        return Prologue(norm.kind, weight, bias, norm.eps)

    def norm_weight(self, name: str | None, size: int, offset: float = 0.0) -> torch.Tensor:
        """Load the weight of a norm, and add `offset`. Each product after a norm has a copy of its weight."""
        if name is None:
            shape = next(iter(self.backends))
            return torch.ones(size, dtype=shape.dtype, device=shape.device)
        weight = self.weights.tensor(f"{name}.weight", (size,))
        is_copied = name in self._loaded_norms
        self._loaded_norms.add(name)
        if offset:
            return weight + offset
        return weight.clone() if is_copied else weight

    def head_norm(self, spec: AttentionSpec) -> QKNorm | None:
        """Load the norm of each query and key head, or return None if there is none."""
        if (norm := spec.head_norm) is None or norm.across_heads:
            return None
        weights = [self.norm_weight(each.name, each.size, each.weight_offset) for each in spec.head_norms]
        return QKNorm(
            weights[0], weights[1] if len(weights) > 1 else None, norm.eps, norm.norms_values, norm.follows_rotation
        )

    def query_and_key_norms(self, spec: AttentionSpec) -> list[tuple[int, ResidualSumKernel]]:
        """Load the norms across heads: (size, norm) of the queries and of the keys of a token; empty if there are
        none."""
        if spec.head_norm is None or not spec.head_norm.across_heads:
            return []
        return [(norm.size, self.norm_of_rows(norm)) for norm in spec.head_norms]

    def norm_of_rows(self, norm: NormSpec) -> ResidualSumKernel:
        """Load a norm as a separate kernel, whose second argument is None."""
        return self._kernels.make_residual_sum(NO_PROLOGUE, self.norm(norm), 1.0, 1.0)

    def embedding(self, spec: MatrixSpec) -> RowKernel:
        """Load an embedding table: int64 ids [T] -> rows [T, in_features]."""
        return self._kernels.make_embedding(self._load(spec).matrix)

    def table(self, spec: PositionTableSpec | None) -> torch.Tensor | None:
        """Load a table of learned positions or token types, [rows, size]; None without one."""
        return None if spec is None else self.weights.tensor(f"{spec.name}.weight", (spec.rows, spec.size))

    def recurrence(self, spec: RecurrenceSpec) -> RecurrentKernel:
        """Load the parameters of a recurrence, without the parameters of its projections."""
        return self._kernels.make_recurrence(self._recurrence(spec))

    def _recurrence(self, spec: RecurrenceSpec) -> Recurrence:
        conv, rule = spec.convolution, spec.rule
        weight = self.weights.tensor(f"{conv.name}.weight", (conv.channels, 1, conv.width)).squeeze(1)
        bias = self.weights.tensor(f"{conv.name}.bias", (conv.channels,)) if conv.has_bias else None
        convolution = Convolution(weight, bias)
        if rule is None:
            return ShortConvolution(convolution)
        num_decays = rule.num_decays if isinstance(rule, GatedDeltaSpec) else rule.num_heads
        decay = -torch.exp(self._vector(f"{rule.name}.A_log", rule.num_heads).float())
        decay = decay.repeat_interleave(num_decays // rule.num_heads)
        dt_bias = self._vector(f"{rule.name}.dt_bias", num_decays)
        norm = None if rule.norm is None else self.norm_weight(rule.norm.name, rule.norm.size, rule.norm.weight_offset)
        if isinstance(rule, GatedDeltaSpec):
            assert norm is not None, "the gated delta rule has a norm"
            return GatedDelta(
                convolution=convolution,
                decay=decay,
                dt_bias=dt_bias,
                norm_weight=norm,
                norm_eps=rule.norm.eps,
                **sizes_of(GatedDeltaSizes, rule),
            )
        widths = (rule.out_features, *rule.mixed_parts, rule.num_heads)
        scales = [torch.full((width,), scale) for width, scale in zip(widths, rule.projection_scales, strict=False)]
        return Mamba2(
            convolution=convolution,
            decay=decay,
            dt_bias=dt_bias,
            skip=self._vector(f"{rule.name}.D", rule.num_heads),
            norm_weight=norm,
            norm_eps=0.0 if rule.norm is None else rule.norm.eps,
            projection_scales=torch.cat(scales).to(decay.device) if scales else None,
            **sizes_of(Mamba2Sizes, rule),
        )

    def _vector(self, name: str, size: int) -> torch.Tensor:
        return self.weights.tensor(name, (size,))

    def residual_sum(self, norms: BranchNorms, scale: float = 1.0, *, is_fused: bool = False) -> BranchSum:
        """Load the norms after a branch and after its sum with the residual stream.

        Args:
            scale: the factor of the result.
            is_fused: whether the last product of the branch adds the stream.
        """
        if is_fused and norms.of_sum is None and scale == 1:
            return BranchSum(None, is_fused)
        kernel = self._kernels.make_residual_sum(
            self.norm(norms.after), self.norm(norms.of_sum), norms.multiplier, scale
        )
        return BranchSum(kernel, is_fused)


def _multiply_gate(
    multiply: Callable[[torch.Tensor, torch.Tensor, GateActivation], torch.Tensor],
    projection: LinearKernel,
    activation: GateActivation,
    rows: torch.Tensor,
    x: torch.Tensor,
) -> torch.Tensor:
    return multiply(rows, projection(x), activation)


def _in_latent_space(first: LinearKernel, mixture: MixtureKernel, last: LinearKernel, x: torch.Tensor) -> torch.Tensor:
    """Compute a mixture whose experts work in a narrower space, see `FeedForwardSpec.latent`."""
    return last(mixture(first(x), x))


def _without_residual(mixture: RowKernel, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Compute a mixture without a residual, because `x` has to remain until all experts have read it."""
    assert residual is None, "the residual is added after the experts"
    return mixture(x)
