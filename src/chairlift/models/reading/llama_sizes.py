"""LlamaSizes: the declaration of a Llama-style decoder from its sizes and switches.

RMSNorm, rotary embedding, grouped-query attention and a gated feed-forward network (Llama: Touvron et al., 2023):

    x + attention(norm(x)), then x + down(activation(gate(norm(x))) * up(norm(x)))

A layer may have a mixture of such networks instead (Mixtral: Jiang et al., 2024).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from chairlift.kernels.activations import GateActivation
from chairlift.kernels.routing import ExpertRouting
from chairlift.models.declaration.attention_spec import AttentionSpec, HeadNormSpec, RopeConfig
from chairlift.models.declaration.feed_forward_spec import FeedForwardSpec, RouterSpec, declare_network
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec
from chairlift.models.declaration.matrix_spec import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    LM_HEAD,
    ROUTER,
    MatrixSpec,
    NormSpec,
)
from chairlift.models.declaration.model_config import ModelConfig

QKNormKind = Literal["heads", "plain_heads", "rotated_heads", "rows"]


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of the norms of a layer, each without the name of the layer; None for a norm that it does not have."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionGate:
    """The gate of attention, see `AttentionSpec.gate`.

    Attributes:
        name: the name of its projection, without the name of the layer.
        is_per_head: whether all values of a query head have the same gate.
    """

    name: str
    has_bias: bool = False
    activation: GateActivation = "sigmoid"
    is_per_head: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the parameters of a mixture of experts, each without the name of the layer.

    Attributes:
        router: the matrix of the router.
        up: the gate and the up projection of an expert, or one name for both. "{}" is the number of the expert.
        down: the down projection of an expert.
        selection_bias: see RouterSpec.
        shared_up, shared_down: the projections of the shared experts, as `up` and `down`.
        shared_gate: see ParallelExpertsSpec.gate.
    """

    router: str = "mlp.gate"
    up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    down: str = "mlp.experts.{}.down_proj"
    selection_bias: str | None = None
    shared_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes of the mixtures of experts of a decoder.

    Attributes:
        intermediate_size: the inner size of one expert.
        dense_layers: the numbers of the layers without experts, whose inner size is `LlamaSizes.intermediate_size`.
        has_bias: whether the router and the projections of experts have biases.
        shared_size: the inner size of the shared experts together, a dense network beside the others; 0 without any.
        sum_multiplier: the factor of the sum of the shared and the other experts.
    """

    num_experts: int
    intermediate_size: int
    routing: ExpertRouting
    dense_layers: frozenset[int] = frozenset()
    names: ExpertNames = ExpertNames()
    has_bias: bool = False
    shared_size: int = 0
    sum_multiplier: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSizes:
    """The sizes and switches of a Llama-style decoder.

    Attributes:
        name, dtype: see ModelConfig.
        norms: the norms of each layer.
        norm_kind, norm_weight_offset: see NormSpec, for all norms. A LayerNorm has no bias.
        is_parallel: see LayerSpec.
        layer_heads: the number of query heads of each layer; an empty sequence for `num_heads` in all layers.
        ropes: the rotary embedding of each layer; an empty sequence for `rope` in all layers.
        sliding_windows: the window of each layer, or None for full attention; an empty sequence for none in any layer.
        attention_scale: see AttentionSpec; None for head_dim ** -0.5.
        gated: see FeedForwardSpec; for networks without experts.
        fused_projections: the names of parameters that hold several projections: "qkv_proj" with query, key and value,
            "gate_up_proj" with gate and up.
        qkv_bias, output_bias, mlp_bias: whether these projections have biases.
        experts: the mixtures of experts, or None if no layer has any.
        qk_norm: "heads" for RMSNorm of each query and key head, "plain_heads" for the same without weights,
            "rotated_heads" for "heads" after the rotation, "rows" for RMSNorm across heads, or None.
        residual_multiplier: see BranchNorms.multiplier.
        embedding_multiplier, logits_multiplier, logits_soft_cap: see ModelConfig.
        attention_soft_cap: see AttentionSpec.logits_soft_cap.
        attention_sinks: whether attention has sinks, see AttentionSpec.
        attention_gate: the gate of attention, or None.
        num_unread_layers: see ModelConfig.
    """

    name: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float = 1e-5
    norms: NormNames = field(default_factory=NormNames)
    norm_kind: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_weight_offset: float = 0.0
    is_parallel: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    layer_heads: Sequence[int] = ()
    ropes: Sequence[RopeConfig | None] = ()
    sliding_windows: Sequence[int | None] = ()
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    attention_gate: AttentionGate | None = None
    activation: str = "silu"
    gated: bool = True
    tie_word_embeddings: bool = False
    fused_projections: Collection[str] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertSizes | None = None
    qk_norm: QKNormKind | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None
    num_unread_layers: int = 0
    dtype: str = "float32"

    def with_layer_ropes(self, local: RopeConfig, whole: RopeConfig | None) -> LlamaSizes:
        """Return the sizes with one rotary embedding for layers with a window, and another one for the others."""
        return replace(self, ropes=[whole if window is None else local for window in self.sliding_windows])

    def without_rope(self) -> LlamaSizes:
        """Return the sizes without rotary embeddings."""
        return replace(self, ropes=(None,) * self.num_layers)

    def declare(self) -> ModelConfig:
        """Return the declaration of the model with these sizes."""
        return ModelConfig(
            architecture="llama",
            name=self.name,
            hidden_size=self.hidden_size,
            max_position_embeddings=self.max_position_embeddings,
            embedding=MatrixSpec(EMBEDDING, EMBEDDING, (("model.embed_tokens", self.vocab_size),), self.hidden_size),
            layers=tuple(self.declare_layer(index) for index in range(self.num_layers)),
            head=MatrixSpec(LM_HEAD, LM_HEAD, (("lm_head", self.vocab_size),), self.hidden_size),
            final_norm=self._norm("model.norm"),
            tie_word_embeddings=self.tie_word_embeddings,
            embedding_multiplier=self.embedding_multiplier,
            logits_multiplier=self.logits_multiplier,
            logits_soft_cap=self.logits_soft_cap,
            num_unread_layers=self.num_unread_layers,
            dtype=self.dtype,
        )

    def declare_layer(self, index: int, prefix: str | None = None) -> LayerSpec:
        """Return the declaration of a layer, whose parameters begin with `prefix`, or with its index if it is None."""
        prefix, names = prefix or f"model.layers.{index}", self.norms
        layer = LayerSpec(
            attention=self.declare_attention(f"{prefix}.self_attn", index),
            attention_norms=self._branch_norms(prefix, names.before_attention, names.after_attention),
            feed_forward=self.declare_feed_forward(prefix, index),
            feed_forward_norms=self._branch_norms(prefix, names.before_mlp, names.after_mlp),
            is_parallel=self.is_parallel,
        )
        return self._with_shared_experts(layer, prefix)

    def _with_shared_experts(self, layer: LayerSpec, prefix: str) -> LayerSpec:
        """Return the layer with its shared experts, if it has any, as its dense network, and its mixture beside it."""
        experts, mixture, hidden = self.experts, layer.mixture, self.hidden_size
        if experts is None or mixture is None or not experts.shared_size:
            return layer
        names = experts.names
        bias, down = self.mlp_bias, f"{prefix}.{names.shared_down}"
        up = tuple((f"{prefix}.{name}", 2 * experts.shared_size // len(names.shared_up)) for name in names.shared_up)
        shared = declare_network(up, down, hidden, self.activation, gated=True, has_bias=bias, prefix="shared_")
        gate = names.shared_gate
        matrix = None if gate is None else MatrixSpec(ROUTER, "shared_gate", ((f"{prefix}.{gate}", 1),), hidden)
        norms = layer.feed_forward_norms
        norms = replace(norms, multiplier=norms.multiplier * experts.sum_multiplier)
        return replace(layer, feed_forward=shared, feed_forward_norms=norms).beside_experts(mixture, matrix)

    def _branch_norms(self, prefix: str, before: str | None, after: str | None) -> BranchNorms:
        first, last = (None if name is None else self._norm(f"{prefix}.{name}") for name in (before, after))
        return BranchNorms(first, last, multiplier=self.residual_multiplier)

    def declare_attention(self, prefix: str, index: int) -> AttentionSpec:
        """Return the declaration of the attention of one layer, whose parameters begin with `prefix`."""
        heads = self.layer_heads[index] if self.layer_heads else self.num_heads
        queries, keys = heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
        qkv = self._parts(prefix, parts, "qkv_proj")
        output, gate = ((f"{prefix}.o_proj", self.hidden_size),), self.attention_gate
        gates = None if gate is None else self._gate(prefix, gate, heads if gate.is_per_head else queries)
        return AttentionSpec(
            qkv=MatrixSpec(ATTENTION, "qkv", qkv, self.hidden_size, self.qkv_bias),
            output=MatrixSpec(ATTENTION, "output", output, queries, self.output_bias),
            num_heads=heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            rope=self.ropes[index] if self.ropes else self.rope,
            sliding_window=self.sliding_windows[index] if self.sliding_windows else None,
            head_norm=None if self.qk_norm is None else self._head_norm(prefix),
            logits_soft_cap=self.attention_soft_cap,
            sinks=f"{prefix}.sinks" if self.attention_sinks else None,
            gate=gates,
            gate_activation="sigmoid" if gate is None else gate.activation,
        )

    def _gate(self, prefix: str, gate: AttentionGate, width: int) -> MatrixSpec:
        return MatrixSpec(ATTENTION, "gate", ((f"{prefix}.{gate.name}", width),), self.hidden_size, gate.has_bias)

    def _head_norm(self, prefix: str) -> HeadNormSpec:
        if self.qk_norm == "plain_heads":
            return HeadNormSpec(None, None, self.norm_eps)
        names = f"{prefix}.q_norm", f"{prefix}.k_norm"
        return HeadNormSpec(
            *names,
            self.norm_eps,
            self.norm_weight_offset,
            across_heads=self.qk_norm == "rows",
            follows_rotation=self.qk_norm == "rotated_heads",
        )

    def declare_feed_forward(self, layer: str, index: int) -> FeedForwardSpec:
        """Return the declaration of the network or mixture of one layer, whose parameters begin with `layer`."""
        if self.experts is not None and index not in self.experts.dense_layers:
            return self._mixture(layer, self.experts)
        inner, prefix = self.intermediate_size, f"{layer}.mlp"
        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        parts = self._parts(prefix, [(name, inner) for name in names], "gate_up_proj")
        return declare_network(
            parts, f"{prefix}.down_proj", self.hidden_size, self.activation, gated=self.gated, has_bias=self.mlp_bias
        )

    def _mixture(self, layer: str, experts: ExpertSizes) -> FeedForwardSpec:
        inner, names, bias = experts.intermediate_size, experts.names, experts.has_bias
        router = ((f"{layer}.{names.router}", experts.num_experts),)
        up = tuple((f"{layer}.{name}", 2 * inner // len(names.up)) for name in names.up)
        down, hidden = f"{layer}.{names.down}", self.hidden_size
        expert = declare_network(up, down, hidden, self.activation, gated=True, has_bias=bias, group=EXPERTS)
        selection_bias = None if names.selection_bias is None else f"{layer}.{names.selection_bias}"
        matrix = MatrixSpec(ROUTER, ROUTER, router, self.hidden_size, bias)
        return replace(expert, router=RouterSpec(matrix, experts.routing, selection_bias=selection_bias))

    def _parts(self, prefix: str, parts: Sequence[tuple[str, int]], fused: str) -> tuple[tuple[str, int], ...]:
        """The parameters of a product: one for each part, or one for all of them."""
        if fused in self.fused_projections:
            parts = ((fused, sum(size for _, size in parts)),)
        return tuple((f"{prefix}.{name}", size) for name, size in parts)

    def _norm(self, name: str) -> NormSpec:
        return NormSpec(self.norm_kind, name, self.hidden_size, self.norm_eps, self.norm_weight_offset, has_bias=False)
