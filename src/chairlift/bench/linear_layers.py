"""The linear layers of a model, by what a step calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.kernels.linear import PrologueKind
from chairlift.models.config import ModelConfig

LM_HEAD = "LM head"


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """Matrices over one input that are multiplied as one.

    Attributes:
        kernel: "qkv", "output", "gate_up" ("up" without a gate), "down", or LM_HEAD.
        parts: names of the parameters.
        prologue: what is done to a row first.
        adds: the product is added to the residual stream.
    """

    kernel: str
    parts: tuple[str, ...]
    out_features: int
    in_features: int
    prologue: PrologueKind
    adds: bool = False

    @property
    def input_width(self) -> int:
        """Of a row before the prologue."""
        return self.in_features * (2 if self.prologue == "silu_and_mul" else 1)

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features


def layer_linears(config: ModelConfig, index: int) -> Sequence[LinearLayer]:
    """The linear layers of decoder layer `index`, in the order of a step."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    is_llama = config.architecture == "llama"
    root = f"model.layers.{index}" if is_llama else f"model.decoder.layers.{index}"
    norm = _norm(config)
    attention = f"{root}.self_attn"
    qkv = tuple(f"{attention}.{part}_proj.weight" for part in "qkv")
    output = f"{attention}.{'o_proj' if is_llama else 'out_proj'}.weight"
    both = (
        LinearLayer("qkv", qkv, queries + 2 * keys, hidden, norm),
        LinearLayer("output", (output,), hidden, queries, "none", adds=True),
    )
    if not is_llama:
        return (
            *both,
            LinearLayer("up", (f"{root}.fc1.weight",), inner, hidden, norm),
            LinearLayer("down", (f"{root}.fc2.weight",), hidden, inner, "relu", adds=True),
        )
    gate_up = (f"{root}.mlp.gate_proj.weight", f"{root}.mlp.up_proj.weight")
    return (
        *both,
        LinearLayer("gate_up", gate_up, 2 * inner, hidden, norm),
        LinearLayer("down", (f"{root}.mlp.down_proj.weight",), hidden, inner, "silu_and_mul", adds=True),
    )


def lm_head(config: ModelConfig) -> LinearLayer:
    """The layer that gives the logits; its matrix may be the embedding's."""
    root = "model" if config.architecture == "llama" else "model.decoder"
    name = f"{root}.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    width = config.word_embed_proj_dim or config.hidden_size
    return LinearLayer(
        LM_HEAD, (name,), config.vocab_size, width, _norm(config) if width == config.hidden_size else "none"
    )


def _norm(config: ModelConfig) -> PrologueKind:
    if config.architecture == "llama":
        return "rms_norm"
    return "layer_norm" if config.norm_before else "none"
