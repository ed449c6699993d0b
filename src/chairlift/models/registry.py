"""Models by architecture."""

from __future__ import annotations

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

ModelFactory = Callable[[ModelConfig, Weights, Kernels, AttentionBackend[Any]], Model]

SUPPORTED: dict[str, ModelFactory] = {"llama": LlamaModel, "opt": OPTModel}
"""`ModelConfig.architecture` -> its model."""


def build_model(
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attention_backend: str = "torch",
) -> Model:
    """Make a model of `config` and read its parameters.

    Args:
        dtype, device: of the KV memory; `weights` must yield the same.
        attention_backend: name of the kernel set ("torch", or "reference" for the slow twin of everything).

    Raises:
        ModelLoadError: the architecture or one of its features is not supported, or a parameter cannot be read.
        ConfigError: no kernel set has that name.
    """
    factory = SUPPORTED.get(config.architecture)
    if factory is None:
        known = ", ".join(sorted(SUPPORTED))
        raise ModelLoadError(f"architecture must be one of {known}, got {config.architecture!r} ({config.name})")
    kernels = get_kernels(attention_backend)
    shape = AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        dtype=dtype,
        device=torch.device(device),
    )
    return factory(config, weights, kernels, kernels.attention(shape))
