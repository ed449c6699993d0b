"""From a declaration and its weights to a model."""

from __future__ import annotations

import logging

import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.activations import ACTIVATIONS
from chairlift.kernels.interface import Kernels
from chairlift.kernels.registry import get_kernels
from chairlift.kernels.weights import Weights
from chairlift.models.architectures import architecture_of
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder, shape_of
from chairlift.models.model import Model
from chairlift.models.torch_operations import fallback_note, torch_operations

logger = logging.getLogger("chairlift")


def build_model(
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: str = "torch",
    quantization: str | None = None,
    kv_cache_dtype: torch.dtype | None = None,
) -> Model:
    """Make a model of `config` and read its parameters.

    Args:
        dtype, device: of activations; `weights` must yield the same.
        kernels: the name of the kernel set: "native", "torch" or "reference".
        quantization: the format of all matrices, with native kernels; None: as in the file.
        kv_cache_dtype: of K and V in memory; None: `dtype`.

    Raises:
        ModelLoadError: the architecture or one of its features is not supported, or a parameter cannot be read.
        ConfigError: no kernel set has that name, or it does not have this shape or these types.
    """
    architecture_of(config)
    _check_activations(config)
    kernel_set = get_kernels(kernels, quantization)
    on = torch.device(device)
    shapes = (shape_of(layer.attention, dtype, on, kv_cache_dtype) for layer in config.layers)
    backends = {shape: kernel_set.attention(shape) for shape in dict.fromkeys(shapes)}
    model = Decoder(config, weights, kernel_set, backends)
    for note in (*kernel_set.notes(), *_fallback_notes(config, kernel_set)):
        logger.info("%s", note)
    return model


def _check_activations(config: ModelConfig) -> None:
    for name in {layer.feed_forward.activation for layer in config.layers}:
        if name not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise ModelLoadError(f"activation must be one of {known}, got {name!r} ({config.name})")


def _fallback_notes(config: ModelConfig, kernels: Kernels) -> list[str]:
    found = torch_operations(config) if kernels.name == "native" else []
    return [fallback_note(found)] if found else []
