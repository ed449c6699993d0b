"""The decoder that computes every declared model, and the function that builds it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.activations import ACTIVATIONS
from chairlift.kernels.attention import AttentionMetadata, QKNorm
from chairlift.kernels.backend import AttentionBackend, AttentionShape, StepContext
from chairlift.kernels.interface import Kernels, run_in_order
from chairlift.kernels.linear import NO_PROLOGUE, Prologue
from chairlift.kernels.registry import get_kernels
from chairlift.kernels.weights import Weights
from chairlift.layers.attention import Attention
from chairlift.layers.embedding import Embedding, LMHead
from chairlift.layers.feed_forward import FeedForward
from chairlift.layers.linear import Linear
from chairlift.layers.norm import layer_norm, rms_norm
from chairlift.layers.residual import ResidualSum
from chairlift.layers.rotary import RotaryEmbedding, rope_frequencies, stretch_llama3
from chairlift.models.config import ModelConfig
from chairlift.models.declaration import AttentionSpec, BranchNorms, LayerSpec, MatrixSpec, NormSpec, RopeConfig
from chairlift.models.registry import get_architecture
from chairlift.models.torch_operations import fallback_note, torch_operations

logger = logging.getLogger("chairlift")


class LayerBuilder:
    """Builds layers from their declarations.

    Args:
        backends: the backend of each attention shape, in the order of `StepContext.plans`.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, backends: dict[AttentionShape, Any]
    ) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._backends = backends
        self._shapes = list(backends)
        self._ropes = list(config.ropes)

    def linear(self, matrix: MatrixSpec, prologue: Prologue = NO_PROLOGUE) -> Linear:
        return Linear(
            self._kernels, self._weights, matrix.parts, matrix.in_features, bias=matrix.has_bias, prologue=prologue
        )

    def norm(self, norm: NormSpec | None) -> Prologue:
        if norm is None:
            return NO_PROLOGUE
        make = rms_norm if norm.kind == "rms_norm" else layer_norm
        return make(self._weights, norm.name, norm.size, norm.eps)

    def attention(self, spec: AttentionSpec, norm: NormSpec | None) -> Attention:
        template = self._shapes[0]
        index = self._shapes.index(attention_shape(spec, template.dtype, template.device, template.kv_cache_dtype))
        return Attention(
            self._backends[self._shapes[index]],
            self.linear(spec.qkv, self.norm(norm)),
            self.linear(spec.output),
            plan=index,
            rotation=None if spec.rope is None else self._ropes.index((spec.rope, spec.head_dim)),
            head_norm=self._head_norm(spec),
            sliding_window=spec.sliding_window,
        )

    def _head_norm(self, spec: AttentionSpec) -> QKNorm | None:
        norm = spec.head_norm
        if norm is None:
            return None
        query, key = (self._weights.tensor(f"{name}.weight", (spec.head_dim,)) for name in (norm.query, norm.key))
        return QKNorm(query, key, norm.eps)

    def feed_forward(self, layer: LayerSpec) -> FeedForward:
        spec = layer.feed_forward
        up = self.linear(spec.up, self.norm(layer.feed_forward_norms.before))
        return FeedForward(up, self.linear(spec.down, Prologue(spec.activation_kernel)))

    def residual_sum(self, norms: BranchNorms, multiplier: float) -> ResidualSum:
        after, of_sum = (
            None if norm is None else self._kernels.make_prologue(self.norm(norm))
            for norm in (norms.after, norms.of_sum)
        )
        return ResidualSum(after, of_sum, multiplier)


class DecoderLayer:
    """One declared layer: x [T, hidden_size] -> [T, hidden_size]; it may overwrite x."""

    def __init__(self, builder: LayerBuilder, layer: LayerSpec) -> None:
        self.attention = builder.attention(layer.attention, layer.attention_norms.before)
        self.add_attention = builder.residual_sum(layer.attention_norms, layer.residual_multiplier)
        self.feed_forward = builder.feed_forward(layer)
        self.add_feed_forward = builder.residual_sum(layer.feed_forward_norms, layer.residual_multiplier)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        x = self.add_attention(x, self.attention(x, step, self.add_attention.fused(x)))
        return self.add_feed_forward(x, self.feed_forward(x, self.add_feed_forward.fused(x)))


class DecoderModel:
    """The model that a declaration describes. The caller runs it under `torch.inference_mode`.

    Call `allocate_kv_cache` once, and then in every step `plan`, `forward`, and `logits` for the rows that are sampled.

    Args:
        backends: the backend of each attention shape of the layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        backends: dict[AttentionShape, AttentionBackend[Any]],
    ) -> None:
        self.config = config
        self.attention_backends = list(backends.values())
        builder = LayerBuilder(config, weights, kernels, backends)
        device = next(iter(backends)).device
        ((name, vocab_size),) = config.embedding.parts
        self.embedding = Embedding(kernels, weights, name, vocab_size, config.embedding.in_features)
        table = config.positions
        self.position_table = (
            None if table is None else weights.tensor(f"{table.name}.weight", (table.rows, table.size))
        )
        self.project_in = None if config.project_in is None else builder.linear(config.project_in)
        self.rotary = [
            make_rotary(rope, head_dim, config.max_position_embeddings, device) for rope, head_dim in config.ropes
        ]
        self.layers = [DecoderLayer(builder, layer) for layer in config.layers]
        norm = builder.norm(config.final_norm)
        self.project_out: Linear | None = None
        if config.project_out is not None:
            self.project_out, norm = builder.linear(config.project_out, norm), NO_PROLOGUE
        tied_to = self.embedding if config.tie_word_embeddings else None
        ((name, vocab_size),) = config.head.parts
        width = config.head.in_features
        self.lm_head = LMHead(kernels, weights, name, vocab_size, width, tied_to=tied_to, prologue=norm)
        self._run_layers = run_in_order if torch_operations(config) else kernels.run_layers

    @property
    def attention_layers(self) -> Sequence[Attention]:
        """The attention of each layer, in the order of the layers."""
        return [layer.attention for layer in self.layers]

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate zeroed KV memory for the block ids 0 to num_blocks - 1 in every layer."""
        for layer in self.attention_layers:
            layer.allocate_kv_cache(num_blocks, block_size)

    def plan(self, metadata: AttentionMetadata) -> tuple[Any, ...]:
        """Return one plan of the step for each attention backend, as the argument of `forward`."""
        return tuple(backend.plan(metadata) for backend in self.attention_backends)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        """Run the layers on the tokens of one step, and write their K and V.

        Args:
            token_ids, positions: int64 [T], packed as in the metadata of the plan.
            plan: the result of `plan` for this step.

        Returns:
            The hidden states for `logits`: [T, hidden_size].
        """
        rotations = tuple(rotary.at(positions) for rotary in self.rotary)
        return self._run_layers(self.layers, self._embed(token_ids, positions), StepContext(positions, rotations, plan))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits, float32 [N, vocab_size], of rows of `forward`'s result, [N, hidden_size]."""
        logits = self.lm_head(hidden if self.project_out is None else self.project_out(hidden))
        if self.config.logits_multiplier != 1:
            logits = logits.mul_(self.config.logits_multiplier)
        cap = self.config.logits_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(token_ids)
        if self.config.embedding_multiplier != 1:
            x = x.mul_(self.config.embedding_multiplier)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.position_table is not None and self.config.positions is not None:
            x = x.add_(self.position_table[positions + self.config.positions.offset])
        return x


def attention_shape(
    spec: AttentionSpec, dtype: torch.dtype, device: torch.device, kv_cache_dtype: torch.dtype | None
) -> AttentionShape:
    """Return the properties of an attention layer on which its backend depends."""
    return AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        dtype=dtype,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
    )


def make_rotary(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> RotaryEmbedding:
    """Build the rotary embedding that `rope` describes.

    Raises:
        ModelLoadError: The scaling is not supported.
    """
    frequencies = rope_frequencies(head_dim, rope.theta)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        frequencies = stretch_llama3(
            frequencies,
            factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_positions=rope.original_max_position_embeddings,
        )
    elif rope.scaling == "factors":
        frequencies = frequencies / torch.tensor(rope.freq_factors)
    elif rope.scaling != "none":
        raise ModelLoadError(f"rope scaling must be none, linear, llama3 or factors; got {rope.scaling!r}")
    return RotaryEmbedding(frequencies, max_positions, device)


def build_model(
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: str = "torch",
    quantization: str | None = None,
    kv_cache_dtype: torch.dtype | None = None,
) -> DecoderModel:
    """Build the model of a declaration and load its parameters.

    Args:
        dtype, device: the type and device of the activations, which `weights` must use as well.
        kernels: the name of the kernel set: "native", "torch" or "reference".
        quantization: the format of all matrices under native kernels, or None for the format of the file.
        kv_cache_dtype: the type of K and V in memory, or None for `dtype`.

    Raises:
        ModelLoadError: The architecture or one of its features is not supported, or a parameter cannot be read.
        ConfigError: There is no such kernel set, or it does not support the shape or types of the model.
    """
    get_architecture(config)
    _check_activations(config)
    kernel_set = get_kernels(kernels, quantization)
    target = torch.device(device)
    shapes = (attention_shape(layer.attention, dtype, target, kv_cache_dtype) for layer in config.layers)
    backends = {shape: kernel_set.attention(shape) for shape in dict.fromkeys(shapes)}
    model = DecoderModel(config, weights, kernel_set, backends)
    operations = torch_operations(config) if kernel_set.name == "native" else []
    for note in (*kernel_set.notes(), *([fallback_note(operations)] if operations else [])):
        logger.info("%s", note)
    return model


def _check_activations(config: ModelConfig) -> None:
    for name in {layer.feed_forward.activation for layer in config.layers}:
        if name not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise ModelLoadError(f"activation must be one of {known}; got {name!r} ({config.name})")
