"""The sizes of a model that determine the cost of a step, derived from the declaration of its layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from chairlift.models.declaration.layer_spec import LayerSpec
from chairlift.models.declaration.matrix_spec import EXPERTS
from chairlift.models.declaration.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ExpertCost:
    """The sizes of a mixture of experts that determine its cost.

    Attributes:
        num_weights: number of values in the matrices of one expert.
    """

    num_experts: int
    experts_per_token: int
    num_weights: int

    def num_read(self, num_tokens: int) -> float:
        """The expected number of experts that a step reads, if every token draws its experts at random."""
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The sizes of a layer that determine its cost.

    Attributes:
        num_weights: number of values in the matrices that every token is multiplied by, without norms and biases.
        attention_size: number of query heads times head size.
        kv_values: number of values of K and V of one token that the layer reads.
        kept_kv_values: number of those that the layer keeps, which are 0 if it reads K and V of another layer.
        experts: its mixture of experts, or None.
    """

    num_weights: int
    attention_size: int
    num_kv_heads: int
    kv_values: int
    kept_kv_values: int
    experts: ExpertCost | None = None

    @classmethod
    def from_layer(cls, layer: LayerSpec) -> LayerCost:
        spec, mixture = layer.attention, layer.mixture
        num_weights = sum(matrix.num_weights for matrix in layer.matrices if matrix.group != EXPERTS)
        experts: ExpertCost | None = None
        if mixture is not None and (router := mixture.router) is not None:
            size = mixture.up.num_weights + mixture.down.num_weights
            experts = ExpertCost(router.num_experts, router.routing.experts_per_token, size)
        if spec is None:
            return cls(num_weights, 0, 0, 0, 0, experts)
        kept, read = spec.num_kept_values, spec.num_kept_memories * spec.key_size
        return cls(num_weights, spec.query_size, spec.num_kv_heads, read, kept, experts)


@dataclass(frozen=True)
class ModelShape:
    """The declaration of a model with the size of its values in memory. Sliding windows are not modelled: every layer
    is assumed to attend to all tokens.

    Attributes:
        bytes_per_weight, bytes_per_kv_value: 2 for half precision. Sizes of quantized values include the scales.
    """

    name: str
    config: ModelConfig
    bytes_per_weight: float = 2
    bytes_per_kv_value: float = 2

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @cached_property
    def layers(self) -> list[tuple[LayerCost, int]]:
        """The different layer costs, each with its number of layers."""
        return list(Counter(LayerCost.from_layer(layer) for layer in self.config.layers).items())

    @property
    def lm_head_weights(self) -> int:
        return self.config.head.num_weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads, which are those of all layers and the LM head.

        A step with few tokens reads a part of the experts.
        """
        return round(sum(matrix.num_weights for matrix in self.config.read_matrices) * self.bytes_per_weight)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence in all layers, in float32."""
        return 4 * self.config.state_values_per_sequence

    @property
    def kv_bytes_per_slot(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return sum(count * round(layer.kept_kv_values * self.bytes_per_kv_value) for layer, count in self.layers)
