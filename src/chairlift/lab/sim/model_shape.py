"""The sizes of a model that determine the cost of a step, derived from the declaration of its layers, and those of the
models that papers measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift.errors import ConfigError
from chairlift.models.architectures.opt import OPTSizes
from chairlift.models.declaration.layer_spec import LayerSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.llama_sizes import LlamaSizes


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
# Arguments of _gated: name, layers, hidden, heads, KV heads, head_dim, intermediate, vocabulary, context.
_SHAPES: Final = (
    _ungated("opt-13b", 40, 5120, 40),
    _ungated("opt-66b", 64, 9216, 72),
    _ungated("opt-175b", 96, 12288, 96),
    _ungated("gpt3-175b", 96, 12288, 96, 50257),
    _gated("llama-13b", 40, 5120, 40, 40, 128, 13824, 32000, 2048),
    _gated("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096),
    _gated("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192),
    _gated("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000, 32768),
    _gated("yi-34b", 60, 7168, 56, 8, 128, 20480, 64000, 4096),
    _ungated("falcon-180b", 80, 14848, 232, 65024, kv_heads=8),
    _gated("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 8192),
)
MODEL_SHAPES: Final = {shape.name: shape for shape in _SHAPES}


def model_shape(name: str) -> ModelShape:
    """Returns the shape of a model by name, in half precision; raises ConfigError if it is unknown."""
    if name not in MODEL_SHAPES:
        raise ConfigError(f"model {name!r}: no such shape; use one of {', '.join(MODEL_SHAPES)}")
    return MODEL_SHAPES[name]
