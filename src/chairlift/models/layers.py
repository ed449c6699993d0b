"""The decoder layer that computes every declared layer, and the builder that loads its parameters."""

from __future__ import annotations

from typing import Any

import torch

from chairlift.kernels.attention import AttentionShape, KVCache, QKNorm, StepContext
from chairlift.kernels.interface import NO_PROLOGUE, Kernels, LinearKernel, Prologue, RowKernel
from chairlift.kernels.weights import Weights
from chairlift.models.declaration import AttentionSpec, BranchNorms, LayerSpec, MatrixSpec, ModelConfig, NormSpec


class LayerBuilder:
    """Builds the parts of layers from their declarations.

    Args:
        backends: the backend of each attention shape, in the order of `StepContext.plans`.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, backends: dict[AttentionShape, Any]
    ) -> None:
        self.weights = weights
        self.backends = backends
        self.ropes = list(config.ropes)
        self._kernels = kernels

    def linear(self, spec: MatrixSpec, prologue: Prologue = NO_PROLOGUE) -> LinearKernel:
        """Load matrices with the same input, and their biases, as one product: [T, in] -> [T, out_features]."""
        matrix = self._kernels.load_matrix(self.weights, spec.parts, spec.in_features)
        biases = [self.weights.tensor(f"{name}.bias", (out,)) for name, out in spec.parts] if spec.has_bias else []
        return self._kernels.make_linear(matrix, torch.cat(biases) if biases else None, prologue)

    def norm(self, norm: NormSpec | None) -> Prologue:
        """Load a norm as the prologue of a product."""
        if norm is None:
            return NO_PROLOGUE
        weight = self.weights.tensor(f"{norm.name}.weight", (norm.size,))
        bias = self.weights.tensor(f"{norm.name}.bias", (norm.size,)) if norm.kind == "layer_norm" else None
        return Prologue(norm.kind, weight, bias, norm.eps)

    def residual_sum(self, norms: BranchNorms, multiplier: float) -> ResidualSum:
        """Load the norms after a branch and after its sum with the residual stream."""
        return ResidualSum(self._row_norm(norms.after), self._row_norm(norms.of_sum), multiplier)

    def _row_norm(self, norm: NormSpec | None) -> RowKernel | None:
        return None if norm is None else self._kernels.make_prologue(self.norm(norm))


class Attention:
    """output(attention(qkv(norm(x)))), grouped-query and over paged KV memory: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, builder: LayerBuilder, spec: AttentionSpec, norm: NormSpec | None) -> None:
        shapes = list(builder.backends)
        shape = attention_shape(spec, shapes[0].dtype, shapes[0].device, shapes[0].kv_cache_dtype)
        self._backend = builder.backends[shape]
        self._plan = shapes.index(shape)
        self._rotation = None if spec.rope is None else builder.ropes.index((spec.rope, spec.head_dim))
        self._qkv = builder.linear(spec.qkv, builder.norm(norm))
        self._output = builder.linear(spec.output)
        self._head_norm: QKNorm | None = None
        if (norms := spec.head_norm) is not None:
            names = (norms.query, norms.key)
            query, key = (builder.weights.tensor(f"{name}.weight", (spec.head_dim,)) for name in names)
            self._head_norm = QKNorm(query, key, norms.eps)
        self._sliding_window = spec.sliding_window
        self._kv_cache: KVCache | None = None

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate zeroed KV memory; the earlier memory is freed first."""
        self._kv_cache = None
        self._kv_cache = self._backend.allocate(num_blocks, block_size)

    def __call__(self, x: torch.Tensor, step: StepContext, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute attention, plus `residual` if there is one, which the caller gives up."""
        assert self._kv_cache is not None, "call allocate_kv_cache first"
        attended = self._backend.forward(
            self._qkv(x),
            None if self._rotation is None else step.rotations[self._rotation],
            self._kv_cache,
            step.plans[self._plan],
            self._sliding_window,
            self._head_norm,
        )
        return self._output(attended, residual)


class ResidualSum:
    """of_sum(stream + multiplier * after(branch)).

    Args:
        after, of_sum: None leaves rows as they are.
    """

    def __init__(self, after: RowKernel | None, of_sum: RowKernel | None, multiplier: float) -> None:
        self._after = after
        self._of_sum = of_sum
        self._multiplier = multiplier
        self._is_fused = after is None and multiplier == 1

    def fused(self, stream: torch.Tensor) -> torch.Tensor | None:
        """The residual that the last product of the branch adds: the stream, unless a norm or factor precedes the
        sum."""
        return stream if self._is_fused else None

    def __call__(self, stream: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """The sum, computed in the memory of `stream`; with a `fused` residual, `branch` is the sum already."""
        if not self._is_fused:
            if self._after is not None:
                branch = self._after(branch)
            branch = stream.add_(branch, alpha=self._multiplier)
        return branch if self._of_sum is None else self._of_sum(branch)


class DecoderLayer:
    """One declared layer: x [T, hidden_size] -> [T, hidden_size]; it may overwrite x."""

    def __init__(self, builder: LayerBuilder, layer: LayerSpec) -> None:
        feed_forward, norms = layer.feed_forward, layer.feed_forward_norms
        self.attention = Attention(builder, layer.attention, layer.attention_norms.before)
        self.add_attention = builder.residual_sum(layer.attention_norms, layer.residual_multiplier)
        self.up = builder.linear(feed_forward.up, builder.norm(norms.before))
        self.down = builder.linear(feed_forward.down, Prologue(feed_forward.activation_kernel))
        self.add_feed_forward = builder.residual_sum(norms, layer.residual_multiplier)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        x = self.add_attention(x, self.attention(x, step, self.add_attention.fused(x)))
        return self.add_feed_forward(x, self.down(self.up(x), self.add_feed_forward.fused(x)))


def attention_shape(
    spec: AttentionSpec, dtype: torch.dtype, device: torch.device, kv_cache_dtype: torch.dtype | None
) -> AttentionShape:
    """Return the properties of an attention layer on which its backend depends."""
    return AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, dtype, device, kv_cache_dtype)
