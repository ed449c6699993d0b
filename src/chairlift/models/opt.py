"""OPT (Zhang et al., 2022): learned positions, LayerNorm before (350m: after), an ungated MLP, biases everywhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from chairlift.errors import ModelLoadError
from chairlift.kernels.backend import AttentionBackend
from chairlift.kernels.registry import Kernels
from chairlift.layers.attention import Attention
from chairlift.layers.embedding import Embedding, LMHead
from chairlift.layers.linear import Linear
from chairlift.layers.norm import LayerNorm
from chairlift.layers.weights import Weights
from chairlift.models.config import ModelConfig
from chairlift.models.model import Model

POSITION_OFFSET = 2
"""Row of the position table that position 0 reads."""


class OPTLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); with `norm_before` off, norm(x + attention(x)) and so on."""

    def __init__(
        self, kernels: Kernels, backend: AttentionBackend[Any], config: ModelConfig, weights: Weights, prefix: str
    ) -> None:
        size, inner, eps, bias = config.hidden_size, config.intermediate_size, config.norm_eps, config.mlp_bias
        self.norm_before = config.norm_before
        self.attention_norm = LayerNorm(kernels, weights, f"{prefix}.self_attn_layer_norm", size, eps)
        self.attention = Attention(
            kernels,
            backend,
            weights,
            f"{prefix}.self_attn",
            hidden_size=size,
            output="out_proj",
            qkv_bias=config.attention_bias,
            output_bias=config.attention_output_bias,
        )
        self.mlp_norm = LayerNorm(kernels, weights, f"{prefix}.final_layer_norm", size, eps)
        self.up = Linear(kernels, weights, [(f"{prefix}.fc1", inner)], size, bias=bias)
        self.down = Linear(kernels, weights, [(f"{prefix}.fc2", size)], inner, bias=bias)

    def __call__(self, x: torch.Tensor, plan: Any) -> torch.Tensor:
        if self.norm_before:
            x = x + self.attention(self.attention_norm(x), None, plan)
            return x + self._mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, None, plan))
        return self.mlp_norm(x + self._mlp(x))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class OPTModel(Model):
    """OPT 125m to 66b."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, backend: AttentionBackend[Any]) -> None:
        super().__init__(config, backend)
        if config.activation != "relu":
            raise ModelLoadError(f"activation must be relu for an OPT model, got {config.activation!r}")
        prefix = "model.decoder" if weights.has("model.decoder.embed_tokens.weight") else "decoder"
        size, vocab = config.hidden_size, config.vocab_size
        word_size = config.word_embed_proj_dim or size
        rows = config.max_position_embeddings + POSITION_OFFSET
        self.embedding = Embedding(kernels, weights, f"{prefix}.embed_tokens", vocab, word_size)
        self.position_embedding = Embedding(kernels, weights, f"{prefix}.embed_positions", rows, size)
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if word_size != size:
            self.project_in = Linear(kernels, weights, [(f"{prefix}.project_in", size)], word_size, bias=False)
            self.project_out = Linear(kernels, weights, [(f"{prefix}.project_out", word_size)], size, bias=False)
        layers = (f"{prefix}.layers.{i}" for i in range(config.num_layers))
        self.layers = [OPTLayer(kernels, backend, config, weights, layer) for layer in layers]
        self.final_norm: LayerNorm | None = None
        if config.norm_before and config.final_norm:
            self.final_norm = LayerNorm(kernels, weights, f"{prefix}.final_layer_norm", size, config.norm_eps)
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.lm_head = LMHead(kernels, weights, "lm_head", vocab, word_size, tied_to)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        x = self.embedding(token_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + self.position_embedding(positions + POSITION_OFFSET)
        for layer in self.layers:
            x = layer(x, plan)
        return x if self.final_norm is None else self.final_norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden if self.project_out is None else self.project_out(hidden))
