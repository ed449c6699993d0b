"""The operations of a model's layers that native kernels lack, and that torch computes instead."""

from __future__ import annotations

from chairlift.kernels.activations import NATIVE_PROLOGUES
from chairlift.models.declaration import ModelConfig


def torch_operations(config: ModelConfig) -> list[str]:
    """Return the operations of a model's layers that native kernels lack, each once.

    If the list is empty, native kernels compute all layers, and decode steps can be recorded.
    """
    kernels = dict.fromkeys(layer.feed_forward.activation_kernel for layer in config.layers)
    found = [f"activation {kernel}" for kernel in kernels if kernel not in NATIVE_PROLOGUES]
    specs = [layer.attention for layer in config.layers]
    shapes = {(s.num_heads, s.num_kv_heads, s.head_dim, s.scale, s.logits_soft_cap) for s in specs}
    return [*found, *([f"{len(shapes)} shapes of attention"] if len(shapes) > 1 else [])]


def fallback_note(operations: list[str]) -> str:
    """Return the message for a model with these `torch_operations` under native kernels."""
    return (
        f"native kernels do not support {', '.join(operations)}: torch computes these operations, and decode steps are "
        f"not recorded"
    )
