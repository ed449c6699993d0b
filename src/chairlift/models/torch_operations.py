"""The operations of a model that native kernels lack, and that torch computes instead."""

from __future__ import annotations

from chairlift.kernels.activations import NATIVE_PROLOGUES
from chairlift.models.declaration.model_config import ModelConfig


def torch_operations(config: ModelConfig) -> list[str]:
    """Return the operations of a model's layers that native kernels lack, each once: activations.

    If the list is empty, native kernels compute all layers, and decode steps can be recorded.
    """
    branches = (branch for layer in config.layers for branch in (*layer.feed_forwards, layer.per_layer_branch))
    kernels = dict.fromkeys(branch.activation_kernel for branch in branches if branch is not None)
    return [f"activation {kernel}" for kernel in kernels if kernel not in NATIVE_PROLOGUES]


def fallback_notes(config: ModelConfig) -> list[str]:
    """Return the message for a model with `torch_operations` under native kernels; empty without any."""
    names = ", ".join(torch_operations(config))
    note = f"native kernels do not support {names}: torch computes these operations, and decode steps are not recorded"
    return [note] if names else []
