"""The shapes of models that papers measure."""

from __future__ import annotations

from typing import Final

from chairlift.errors import ConfigError
from chairlift.lab.sim.model_shape import ModelShape
from chairlift.models.architectures.opt import OPTSizes
from chairlift.models.reading.llama_sizes import LlamaSizes


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
