"""The sizes of a model that determine the cost of a step, derived from the declaration of its layers."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.models.declaration.layer_spec import LayerSpec
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

    @classmethod
    def from_layer(cls, layer: LayerSpec) -> ExpertCost | None:
        mixture = layer.mixture
        if mixture is None or (router := mixture.router) is None:
            return None
        size = mixture.up.num_weights + mixture.down.num_weights
        return cls(router.num_experts, router.routing.experts_per_token, size)


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

    @property
    def lm_head_weights(self) -> int:
        return self.config.head.num_weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads, in all layers and the LM head.

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
        specs = [layer.attention for layer in self.config.layers if layer.attention is not None]
        return sum(round(spec.num_kept_values * self.bytes_per_kv_value) for spec in specs)
