"""Llama and its kin (Touvron et al., 2023): RMSNorm before, rotary embedding, grouped-query attention, SwiGLU.

Mistral adds a sliding window, Qwen2 a bias on q, k and v, Qwen3 a norm on q and k; `ModelConfig` names each of them.
"""

from __future__ import annotations

from typing import Any

import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.backend import AttentionBackend, RotaryStep
from chairlift.kernels.registry import Kernels
from chairlift.layers.attention import Attention
from chairlift.layers.embedding import Embedding, LMHead
from chairlift.layers.linear import Linear
from chairlift.layers.norm import RMSNorm
from chairlift.layers.weights import Weights
from chairlift.models.config import ModelConfig
from chairlift.models.model import Model, make_rotary


class LlamaMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, kernels: Kernels, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        gate_up = [(f"{prefix}.gate_proj", inner), (f"{prefix}.up_proj", inner)]
        self._gate_up = Linear(kernels, weights, gate_up, hidden, bias=bias)
        self._down = Linear(kernels, weights, [(f"{prefix}.down_proj", hidden)], inner, bias=bias)
        self._activation = kernels.silu_and_mul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._activation(self._gate_up(x)))


class LlamaLayer:
    """Takes the last layer's output and the residual stream before it is added; gives its own in the same way."""

    def __init__(
        self, kernels: Kernels, backend: AttentionBackend[Any], config: ModelConfig, weights: Weights, index: int
    ) -> None:
        prefix = f"model.layers.{index}"
        size, eps = config.hidden_size, config.norm_eps
        self.input_norm = RMSNorm(kernels, weights, f"{prefix}.input_layernorm", size, eps)
        self.attention = Attention(
            kernels,
            backend,
            weights,
            f"{prefix}.self_attn",
            hidden_size=size,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_output_bias,
            qk_norm_eps=eps if config.qk_norm else None,
            sliding_window=config.sliding_windows[index],
        )
        self.post_attention_norm = RMSNorm(kernels, weights, f"{prefix}.post_attention_layernorm", size, eps)
        self.mlp = LlamaMLP(kernels, config, weights, f"{prefix}.mlp")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotary: RotaryStep, plan: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, rotary, plan)
        x, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(x), residual


class LlamaModel(Model):
    """Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, backend: AttentionBackend[Any]) -> None:
        super().__init__(config, backend)
        if config.rope is None:
            raise ModelLoadError(f"a {config.name} model needs rotary embedding, and its config has none")
        if config.activation != "silu":
            raise ModelLoadError(f"activation must be silu for a {config.name} model, got {config.activation!r}")
        size, vocab = config.hidden_size, config.vocab_size
        self.embedding = Embedding(kernels, weights, "model.embed_tokens", vocab, size)
        self.rotary = make_rotary(config.rope, config.head_dim, config.max_position_embeddings, backend.shape.device)
        self.layers = [LlamaLayer(kernels, backend, config, weights, i) for i in range(config.num_layers)]
        self.norm = RMSNorm(kernels, weights, "model.norm", size, config.norm_eps)
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.lm_head = LMHead(kernels, weights, "lm_head", vocab, size, tied_to)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        rotary = self.rotary.at(positions)
        x, residual = self.embedding(token_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, rotary, plan)
        assert residual is not None, "a model has at least one layer"
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)
