"""OPT (Zhang et al., 2022): learned positions, LayerNorm before (350m: after), an ungated MLP, biases everywhere."""

from __future__ import annotations

from typing import Any

import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.backend import AttentionBackend
from chairlift.kernels.linear import NO_PROLOGUE, RELU
from chairlift.kernels.registry import Kernels
from chairlift.kernels.weights import Weights
from chairlift.layers.attention import Attention
from chairlift.layers.embedding import Embedding, LMHead
from chairlift.layers.linear import Linear
from chairlift.layers.norm import layer_norm
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
        names = ("self_attn_layer_norm", "final_layer_norm")
        norms = [layer_norm(weights, f"{prefix}.{name}", size, eps) for name in names]
        before = norms if config.norm_before else [NO_PROLOGUE, NO_PROLOGUE]
        self.norms_after = [] if config.norm_before else [kernels.make_prologue(norm) for norm in norms]
        self.attention = Attention(
            kernels,
            backend,
            weights,
            f"{prefix}.self_attn",
            hidden_size=size,
            prologue=before[0],
            output="out_proj",
            qkv_bias=config.attention_bias,
            output_bias=config.attention_output_bias,
        )
        self.up = Linear(kernels, weights, [(f"{prefix}.fc1", inner)], size, bias=bias, prologue=before[1])
        self.down = Linear(kernels, weights, [(f"{prefix}.fc2", size)], inner, bias=bias, prologue=RELU)

    def __call__(self, x: torch.Tensor, plan: Any) -> torch.Tensor:
        if not self.norms_after:
            return self._mlp(self.attention(x, None, plan))
        attention_norm, mlp_norm = self.norms_after
        return mlp_norm(self._mlp(attention_norm(self.attention(x, None, plan))))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x), residual=x)


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
        self.position_table = weights.tensor(f"{prefix}.embed_positions.weight", (rows, size))
        norm = NO_PROLOGUE
        if config.norm_before and config.final_norm:
            norm = layer_norm(weights, f"{prefix}.final_layer_norm", size, config.norm_eps)
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if word_size != size:
            self.project_in = Linear(kernels, weights, [(f"{prefix}.project_in", size)], word_size)
            self.project_out = Linear(kernels, weights, [(f"{prefix}.project_out", word_size)], size, prologue=norm)
            norm = NO_PROLOGUE
        layers = (f"{prefix}.layers.{i}" for i in range(config.num_layers))
        self.layers = [OPTLayer(kernels, backend, config, weights, layer) for layer in layers]
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.lm_head = LMHead(kernels, weights, "lm_head", vocab, word_size, tied_to=tied_to, prologue=norm)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        x = self.embedding(token_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + self.position_table[positions + POSITION_OFFSET]
        for layer in self.layers:
            x = layer(x, plan)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden if self.project_out is None else self.project_out(hidden))
