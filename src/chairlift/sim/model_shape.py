"""What a step of a model costs by its declaration, and the declarations of the models that papers measure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from chairlift.errors import ConfigError
from chairlift.models.config import ModelConfig
from chairlift.models.declaration import LayerSpec
from chairlift.models.llama import LlamaSizes
from chairlift.models.opt import OPTSizes


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The sizes of a layer that decide what it costs.

    Attributes:
        num_weights: values in its matrices; norms and biases are left out.
        attention_size: query heads times head size.
        kv_values: K and V of one token.
    """

    num_weights: int
    attention_size: int
    num_kv_heads: int
    kv_values: int

    @classmethod
    def from_layer(cls, layer: LayerSpec) -> LayerCost:
        state = layer.state
        num_weights = sum(matrix.num_weights for matrix in layer.matrices)
        return cls(num_weights, layer.attention.query_size, state.num_kv_heads, state.values_per_token)


@dataclass(frozen=True)
class ModelShape:
    """A declaration, and how many bytes its values have in memory. Sliding windows are not modelled: every layer is
    taken to attend to everything.

    Attributes:
        bytes_per_weight, bytes_per_kv_value: 2 is half precision; those of quantized values include the scales.
    """

    name: str
    config: ModelConfig
    bytes_per_weight: float = 2
    bytes_per_kv_value: float = 2

    @classmethod
    def from_config(cls, config: ModelConfig, name: str, bytes_per_value: int = 2) -> ModelShape:
        """The shape of a model.

        Args:
            bytes_per_value: of weights and of K and V, as they are kept in memory.
        """
        return cls(name, config, bytes_per_value, bytes_per_value)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @cached_property
    def layers(self) -> list[tuple[LayerCost, int]]:
        """Layers that cost the same, and how many there are of them."""
        return list(Counter(LayerCost.from_layer(layer) for layer in self.config.layers).items())

    @property
    def lm_head_weights(self) -> int:
        return self.config.head.num_weights

    @property
    def weight_bytes(self) -> int:
        """Bytes that every step reads: all layers and the LM head."""
        return round(sum(matrix.num_weights for matrix in self.config.read_matrices) * self.bytes_per_weight)

    @property
    def kv_bytes_per_slot(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return sum(count * round(layer.kv_values * self.bytes_per_kv_value) for layer, count in self.layers)


def _gated(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocab: int, context: int
) -> ModelShape:
    sizes = LlamaSizes(
        name=name,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        dtype="float16",
    )
    return ModelShape(name, sizes.declare())


def _ungated(
    name: str, layers: int, hidden: int, heads: int, vocab: int = 50272, kv_heads: int | None = None
) -> ModelShape:
    sizes = OPTSizes(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        max_position_embeddings=2048,
        dtype="float16",
    )
    return ModelShape(name, sizes.declare())


# From the models' published config.json; gpt3-175b from Brown et al. (2020), Table 2.1.
# gated: name, layers, hidden, heads, KV heads, head_dim, intermediate, vocabulary, context; of the others some.
_SHAPES: Final = (
    _ungated("opt-13b", 40, 5120, 40),
    _ungated("opt-66b", 64, 9216, 72),
    _ungated("opt-175b", 96, 12288, 96),
    _ungated("gpt3-175b", 96, 12288, 96, 50257),
    _gated("llama-13b", 40, 5120, 40, 40, 128, 13824, 32000, 2048),
    _gated("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192),
    _gated("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000, 32768),
    _gated("yi-34b", 60, 7168, 56, 8, 128, 20480, 64000, 4096),
    _ungated("falcon-180b", 80, 14848, 232, 65024, kv_heads=8),
    _gated("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 8192),
)
MODEL_SHAPES: Final = {shape.name: shape for shape in _SHAPES}


def model_shape(name: str) -> ModelShape:
    """A shape by name, in half precision; raises ConfigError naming those that are known."""
    if name not in MODEL_SHAPES:
        raise ConfigError(f"model {name!r}: no such shape; known are {', '.join(MODEL_SHAPES)}")
    return MODEL_SHAPES[name]
