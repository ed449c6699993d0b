"""The decoder layer that computes every declared layer."""

from __future__ import annotations

from typing import Any

import torch

from chairlift.kernels.attention import AttentionShape, KVCache, StepContext
from chairlift.kernels.interface import Prologue, ResidualSumKernel
from chairlift.kernels.recurrence import RecurrentState
from chairlift.models.declaration.attention_spec import AttentionSpec
from chairlift.models.declaration.feed_forward_spec import ParallelExpertsSpec
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec, PerLayerBranchSpec
from chairlift.models.declaration.matrix_spec import NormSpec
from chairlift.models.declaration.recurrence_spec import RecurrenceSpec
from chairlift.models.layer_builder import LayerBuilder


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
