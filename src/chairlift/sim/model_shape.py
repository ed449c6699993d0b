"""The sizes of a model that decide what a step costs, and those of the models that papers measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift.errors import ConfigError
from chairlift.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder.

    Attributes:
        gated: the feed-forward network has three matrices (up, gate, down) instead of two.
        max_position_embeddings: its context in tokens.
        bytes_per_weight, bytes_per_kv_value: 2 is half precision; quantized ones have scales in them.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    gated: bool
    vocab_size: int
    max_position_embeddings: int
    bytes_per_weight: float = 2
    bytes_per_kv_value: float = 2

    @classmethod
    def from_config(cls, config: ModelConfig, name: str, bytes_per_value: int = 2) -> ModelShape:
        """The shape of a model that was read from a file. Sliding windows are not modelled: every layer is taken to
        attend to everything.

        Args:
            bytes_per_value: of weights and of K and V, as they are kept in memory.
        """
        return cls(
            name=name,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            gated=config.architecture != "opt",
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            bytes_per_weight=bytes_per_value,
            bytes_per_kv_value=bytes_per_value,
        )

    @property
    def weights_per_layer(self) -> int:
        """Values in the matrices of one layer; norms and biases are left out."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden_size * self.intermediate_size

    @property
    def lm_head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes that every step reads: all layers and the LM head."""
        return round((self.num_layers * self.weights_per_layer + self.lm_head_weights) * self.bytes_per_weight)

    @property
    def kv_bytes_per_layer(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return round(2 * self.num_kv_heads * self.head_dim * self.bytes_per_kv_value)

    @property
    def kv_bytes_per_slot(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.num_layers * self.kv_bytes_per_layer


# name, layers, hidden, heads, KV heads, head_dim, intermediate, gated, vocabulary, context.
# From the models' published config.json; gpt3-175b from Brown et al. (2020), Table 2.1.
_SHAPES: Final = (
    ModelShape("opt-13b", 40, 5120, 40, 40, 128, 20480, False, 50272, 2048),
    ModelShape("opt-66b", 64, 9216, 72, 72, 128, 36864, False, 50272, 2048),
    ModelShape("opt-175b", 96, 12288, 96, 96, 128, 49152, False, 50272, 2048),
    ModelShape("gpt3-175b", 96, 12288, 96, 96, 128, 49152, False, 50257, 2048),
    ModelShape("llama-13b", 40, 5120, 40, 40, 128, 13824, True, 32000, 2048),
    ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, True, 128256, 8192),
    ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 14336, True, 32000, 32768),
    ModelShape("yi-34b", 60, 7168, 56, 8, 128, 20480, True, 64000, 4096),
    ModelShape("falcon-180b", 80, 14848, 232, 8, 64, 59392, False, 65024, 2048),
    ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, True, 49152, 8192),
)
MODEL_SHAPES: Final = {shape.name: shape for shape in _SHAPES}


def model_shape(name: str) -> ModelShape:
    """A shape by name, in half precision; raises ConfigError naming those that are known."""
    if name not in MODEL_SHAPES:
        raise ConfigError(f"model {name!r}: no such shape; known are {', '.join(MODEL_SHAPES)}")
    return MODEL_SHAPES[name]
