"""The decoder layer that computes every declared layer, and the builder that loads its parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from chairlift.kernels.activations import GateActivation
from chairlift.kernels.attention import AttentionShape, KVCache, QKNorm, StepContext
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
from chairlift.kernels.recurrence import (
    Convolution,
    GatedDelta,
    Mamba2,
    Recurrence,
    RecurrentKernel,
    RecurrentState,
    ShortConvolution,
)
from chairlift.kernels.recurrence_sizes import GatedDeltaSizes, Mamba2Sizes, sizes_of
from chairlift.kernels.weights import Weights
from chairlift.models.declaration.attention_spec import AttentionSpec
from chairlift.models.declaration.feed_forward_spec import FeedForwardSpec, ParallelExpertsSpec
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec, PerLayerBranchSpec
from chairlift.models.declaration.matrix_spec import MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ModelConfig, PositionTableSpec
from chairlift.models.declaration.recurrence_spec import GatedDeltaSpec, RecurrenceSpec


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


class Attention:
    """output(attention(qkv(norm(x)))), grouped-query and over paged KV memory: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, builder: LayerBuilder, spec: AttentionSpec, norm: NormSpec | None) -> None:
        shapes = list(builder.backends)
        shape = attention_shape(spec, shapes[0].dtype, shapes[0].device, shapes[0].kv_cache_dtype)
        self.backend: Any = builder.backends[shape]
        self._plan = 0
        self._rotation = None if spec.rope is None else builder.ropes.index((spec.rope, spec.head_dim))
        project = builder.adapted_linear if spec.qkv in spec.adaptable else builder.linear
        self._qkv = project(spec.qkv, builder.norm(norm))
        self._gate = None if spec.gate is None else builder.gate(spec.gate, norm, spec.gate_activation)
        self._output = builder.adapted_linear(spec.output)
        self._head_norm = builder.head_norm(spec)
        self._row_norms = builder.query_and_key_norms(spec)
        sinks = spec.sinks
        self._sinks = None if sinks is None else builder.weights.tensor(f"{sinks}.weight", (spec.num_heads,))
        self._sliding_window = spec.sliding_window
        self.kv_cache: KVCache | None = None
        self.kv_source = spec.kv_source

    def set_kv_cache(self, cache: KVCache | None, plan: int = 0) -> None:
        """Use this KV memory, with the plan at this index of `StepContext.plans`. None drops the earlier memory."""
        self.kv_cache, self._plan = cache, plan

    def __call__(self, x: torch.Tensor, step: StepContext, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute attention, plus `residual` if there is one, which the caller gives up."""
        assert self.kv_cache is not None, "call allocate_kv_cache first"
        qkv = self._project(x)
        rotation = None if self._rotation is None else step.rotations[self._rotation]
        attended = self.backend.forward(
            qkv, rotation, self.kv_cache, step.plans[self._plan], self._sliding_window, self._head_norm, self._sinks
        )
        return self._output(self._output_rows(attended, x), residual)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        """Compute query, key and value, with the norms across heads."""
        qkv = self._qkv(x)
        first = 0
        for size, norm in self._row_norms:
            _norm_in_place(norm, qkv[:, first : first + size])
            first += size
        return qkv

    def _output_rows(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Compute the input of the output projection from the result of the kernel."""
        return attended if self._gate is None else self._gate(attended, x)


def _norm_in_place(norm: ResidualSumKernel, rows: torch.Tensor) -> None:
    normed = norm(rows, None)
    if normed is not rows:
        rows.copy_(normed)


class LatentAttention(Attention):
    """Multi-head latent attention, see `LatentSpec`: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, builder: LayerBuilder, spec: AttentionSpec, norm: NormSpec | None) -> None:
        super().__init__(builder, spec, norm)
        assert spec.latent is not None, "the attention has a latent"
        latent, heads = spec.latent, range(spec.num_heads)
        queried = norm if latent.query_norm is None else latent.query_norm
        query_in = latent.query_in
        self._query_in = None if query_in is None else builder.adapted_linear(query_in, builder.norm(norm))
        self._queries = builder.linear(latent.queries, builder.norm(queried))
        rotated = [latent.rotated_queries.of_expert(head) for head in heads]
        self._rotated_queries = [builder.linear(matrix, builder.norm(queried)) for matrix in rotated]
        self._keys, self._values = (
            [builder.linear(matrices.of_expert(head)) for head in heads] for matrices in (latent.keys, latent.values)
        )
        self._call_each = builder.call_each
        self._key_norm = builder.norm_of_rows(latent.key_norm)
        self._new_rows = builder.new_rows
        self._rotary_dim = spec.head_dim - latent.key_norm.size
        self._row_size, self._value_size = spec.row_size, latent.values.out_features

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        rows = self._new_rows(x, "query and key of the latent", self._row_size)
        *heads, key_rows = rows.chunk(len(self._keys) + 1, dim=1)
        rotated_dims = self._rotary_dim
        inner = x if self._query_in is None else self._query_in(x)
        queries = self._queries(inner).chunk(len(heads), dim=1)
        outs = [*(head[:, :rotated_dims] for head in heads), *(head[:, rotated_dims:] for head in heads)]
        self._call_each([*self._rotated_queries, *self._keys], [*[inner] * len(heads), *queries], outs)
        key = self._qkv(x, out=key_rows)
        _norm_in_place(self._key_norm, key[:, rotated_dims:])
        return rows

    def _output_rows(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows = self._new_rows(x, "values of the latent", len(self._values) * self._value_size)
        heads, parts = (each.chunk(len(self._values), dim=1) for each in (attended, rows))
        self._call_each(self._values, [head[:, self._rotary_dim :] for head in heads], parts)
        return rows


class RecurrentMixer:
    """output(recurrence(input(norm(x)))), with the states of sequences: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, builder: LayerBuilder, spec: RecurrenceSpec, norm: NormSpec | None) -> None:
        self._input = builder.adapted_linear(spec.input, builder.norm(norm))
        self._kernel = builder.recurrence(spec)
        self._output = builder.adapted_linear(spec.output)
        self._gates = [builder.adapted_linear(gate) for gate in spec.gates]
        self._gate_inputs = [gate.in_features for gate in spec.gates]
        self._row_parts = [*(gate.out_features for gate in spec.gates), spec.input.out_features]
        self._new_rows, self._call_each = builder.new_rows, builder.call_each
        self.state: RecurrentState | None = None

    def allocate_state(self, num_slots: int) -> None:
        """Allocate zeroed states; the earlier ones are freed first."""
        self.state = None
        self.state = self._kernel.allocate(num_slots)

    def __call__(self, x: torch.Tensor, step: StepContext, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute the recurrence, plus `residual` if there is one, which the caller gives up."""
        assert self.state is not None, "call allocate_states first"
        assert step.states is not None, "the plan of a model with recurrent state needs the states"
        return self._output(self._kernel(self._project(x), self.state, step.states), residual)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the rows of the recurrence."""
        if not self._gates:
            return self._input(x)
        rows = self._new_rows(x, "rows of the recurrence", sum(self._row_parts))
        *gates, others = torch.split(rows, self._row_parts, dim=1)
        inner = self._input(x, out=others)[:, -sum(self._gate_inputs) :]
        self._call_each(self._gates, torch.split(inner, self._gate_inputs, dim=1), gates)
        return rows


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


def _in_latent_space(first: LinearKernel, mixture: MixtureKernel, last: LinearKernel, x: torch.Tensor) -> torch.Tensor:
    """Compute a mixture whose experts work in a narrower space, see `FeedForwardSpec.latent`."""
    return last(mixture(first(x), x))


def _without_residual(mixture: RowKernel, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Compute a mixture without a residual, because `x` has to remain until all experts have read it."""
    assert residual is None, "the residual is added after the experts"
    return mixture(x)


class ParallelExperts:
    """after_dense(gate * dense) + after(mixture(before(x))), for the result of a dense network, whose values are
    lost."""

    def __init__(self, builder: LayerBuilder, spec: ParallelExpertsSpec) -> None:
        self._mixture = builder.mixture(spec.feed_forward, spec.before)
        self._gate = None if spec.gate is None else builder.gate(spec.gate, spec.before)
        self._norm_dense = None if spec.after_dense is None else builder.norm_of_rows(spec.after_dense)
        self._add = builder.residual_sum(BranchNorms(after=spec.after))

    def __call__(self, dense: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gated = dense if self._gate is None else self._gate(dense, x)
        normed = gated if self._norm_dense is None else self._norm_dense(gated, None)
        return self._add(normed, self._mixture(x))


class PerLayerBranch:
    """projection(activation(gate(x)) * input), with the token's input for this layer: [T, hidden_size] -> [T,
    hidden_size].

    Args:
        index: the index of the layer.
    """

    def __init__(self, builder: LayerBuilder, spec: PerLayerBranchSpec, index: int) -> None:
        self._gate = builder.linear(spec.gate)
        self._projection = builder.linear(spec.projection, Prologue(spec.activation_kernel))
        self._index = index

    def __call__(self, x: torch.Tensor, inputs: torch.Tensor | None) -> torch.Tensor:
        """Compute the branch.

        Args:
            inputs: `StepContext.per_layer_inputs`. The gate is written in front of the layer's input, over the input
                of the layer before, so that both are the row of a gated activation.
        """
        assert inputs is not None, "the model has inputs for each layer"
        self._gate(x, out=inputs[:, self._index])
        return self._projection(inputs[:, self._index : self._index + 2].flatten(1))


class DecoderLayer:
    """One declared layer: x [T, hidden_size] -> [T, hidden_size]; it may overwrite x."""

    def __init__(self, builder: LayerBuilder, layer: LayerSpec, index: int) -> None:
        attention, recurrence, norms = layer.attention, layer.recurrence, layer.feed_forward_norms
        branch, name = layer.per_layer_branch, layer.output_scale
        scale = 1.0 if name is None else float(builder.weights.tensor(name, (1,)))
        self.attention: Attention | None = None
        if attention is not None:
            kind = Attention if attention.latent is None else LatentAttention
            self.attention = kind(builder, attention, layer.attention_norms.before)
        self.add_attention = builder.residual_sum(layer.attention_norms, is_fused=layer.attention_adds_residual)
        self.recurrence = (
            None if recurrence is None else RecurrentMixer(builder, recurrence, layer.recurrence_norms.before)
        )
        self._is_parallel = layer.is_parallel
        self.add_recurrence = builder.residual_sum(layer.recurrence_norms, is_fused=layer.recurrence_adds_residual)
        network = layer.feed_forward
        self.feed_forward = None if network is None else builder.feed_forward(network, norms.before)
        self.add_feed_forward = builder.residual_sum(
            norms, scale if branch is None else 1.0, is_fused=layer.feed_forward_adds_residual
        )
        experts = layer.parallel_experts
        self.parallel_experts = None if experts is None else ParallelExperts(builder, experts)
        self.per_layer_branch = None if branch is None else PerLayerBranch(builder, branch, index)
        self.add_per_layer_branch = None if branch is None else builder.residual_sum(branch.norms, scale)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        parallel = self._feed_forward(x, None) if self._is_parallel else None
        x = self._mix_tokens(x, step)
        if self.feed_forward is not None:
            residual = self.add_feed_forward.residual(x)
            x = self.add_feed_forward(x, self._feed_forward(x, residual) if parallel is None else parallel)
        if self.per_layer_branch is None or self.add_per_layer_branch is None:
            return x
        return self.add_per_layer_branch(x, self.per_layer_branch(x, step.per_layer_inputs))

    def _feed_forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute the feed-forward network, and the mixture beside it, plus `residual` if there is one."""
        assert self.feed_forward is not None, "the layer has a feed-forward network"
        y = self.feed_forward(x, residual)
        return y if self.parallel_experts is None else self.parallel_experts(y, x)

    def _mix_tokens(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Add attention and the recurrence. The sum with the recurrence comes last, because both read x."""
        mixed = None if self.recurrence is None else self.recurrence(x, step, self.add_recurrence.residual(x))
        if self.attention is not None:
            x = self.add_attention(x, self.attention(x, step, self.add_attention.residual(x)))
        return x if mixed is None else self.add_recurrence(x, mixed)


def attention_shape(
    spec: AttentionSpec, dtype: torch.dtype, device: torch.device, kv_cache_dtype: torch.dtype | None
) -> AttentionShape:
    """Return the properties of an attention layer on which its backend depends."""
    return AttentionShape(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.scale,
        dtype,
        device,
        kv_cache_dtype,
        spec.logits_soft_cap,
        spec.latent is not None,
    )
