"""Models by architecture."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.backend import AttentionBackend, AttentionShape
from chairlift.kernels.registry import Kernels, get_kernels
from chairlift.kernels.weights import Weights
from chairlift.models.config import ModelConfig
from chairlift.models.llama import LlamaModel
from chairlift.models.model import Model
from chairlift.models.opt import OPTModel

logger = logging.getLogger("chairlift")

ModelFactory = Callable[[ModelConfig, Weights, Kernels, AttentionBackend[Any]], Model]

SUPPORTED: dict[str, ModelFactory] = {"llama": LlamaModel, "opt": OPTModel}
"""`ModelConfig.architecture` -> its model."""


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
    factory = SUPPORTED.get(config.architecture)
    if factory is None:
        known = ", ".join(sorted(SUPPORTED))
        raise ModelLoadError(f"architecture must be one of {known}, got {config.architecture!r} ({config.name})")
    kernel_set = get_kernels(kernels, quantization)
    shape = AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        dtype=dtype,
        device=torch.device(device),
        kv_cache_dtype=kv_cache_dtype,
    )
    model = factory(config, weights, kernel_set, kernel_set.attention(shape))
    for note in kernel_set.notes():
        logger.info("%s", note)
    return model
