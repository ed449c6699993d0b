"""What a step of a model costs, derived from the declaration of its layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from chairlift.models.config import ModelConfig
from chairlift.models.declaration import LayerSpec


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
