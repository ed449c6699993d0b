"""Llama and its kin (Touvron et al., 2023): RMSNorm before, rotary embedding, grouped-query attention, SwiGLU.

Mistral adds a sliding window, Qwen2 a bias on q, k and v, Qwen3 a norm on q and k; `ModelConfig` names each of them.
"""

from __future__ import annotations

from typing import Any

import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.backend import AttentionBackend, RotaryStep
from chairlift.kernels.linear import SILU_AND_MUL
from chairlift.kernels.registry import Kernels
from chairlift.kernels.weights import Weights
from chairlift.layers.attention import Attention
from chairlift.layers.embedding import Embedding, LMHead
from chairlift.layers.linear import Linear
from chairlift.layers.norm import rms_norm
from chairlift.models.config import ModelConfig
from chairlift.models.model import Model, make_rotary


class LlamaLayer:
    """x + attention(norm(x)), then x + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(
        self, kernels: Kernels, backend: AttentionBackend[Any], config: ModelConfig, weights: Weights, index: int
    ) -> None:
        prefix = f"model.layers.{index}"
        size, inner, eps, bias = config.hidden_size, config.intermediate_size, config.norm_eps, config.mlp_bias
        self.attention = Attention(
            kernels,
            backend,
            weights,
            f"{prefix}.self_attn",
            hidden_size=size,
            prologue=rms_norm(weights, f"{prefix}.input_layernorm", size, eps),
            qkv_bias=config.attention_bias,
            output_bias=config.attention_output_bias,
            qk_norm_eps=eps if config.qk_norm else None,
            sliding_window=config.sliding_windows[index],
        )
        norm = rms_norm(weights, f"{prefix}.post_attention_layernorm", size, eps)
        gate_up = [(f"{prefix}.mlp.gate_proj", inner), (f"{prefix}.mlp.up_proj", inner)]
        down = [(f"{prefix}.mlp.down_proj", size)]
        self.gate_up = Linear(kernels, weights, gate_up, size, bias=bias, prologue=norm)
        self.down = Linear(kernels, weights, down, inner, bias=bias, prologue=SILU_AND_MUL)

    def __call__(self, x: torch.Tensor, rotary: RotaryStep, plan: Any) -> torch.Tensor:
        x = self.attention(x, rotary, plan)
        return self.down(self.gate_up(x), residual=x)


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
        self._run_layers = kernels.run_layers
        self.layers = [LlamaLayer(kernels, backend, config, weights, i) for i in range(config.num_layers)]
        norm = rms_norm(weights, "model.norm", size, config.norm_eps)
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.lm_head = LMHead(kernels, weights, "lm_head", vocab, size, tied_to=tied_to, prologue=norm)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        rotary = self.rotary.at(positions)
        return self._run_layers(self.layers, self.embedding(token_ids), rotary, plan)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)
