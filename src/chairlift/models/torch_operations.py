"""The operations of a model's layers that native kernels lack, and that torch computes instead."""

from __future__ import annotations

from chairlift.kernels.activations import NATIVE_PROLOGUES
from chairlift.models.declaration import LayerSpec, ModelConfig


def torch_operations(config: ModelConfig) -> list[str]:
    """Return the operations of a model's layers that native kernels lack, each once.

    If the list is empty, native kernels compute all layers, and decode steps can be recorded.
    """
    found = dict.fromkeys(operation for layer in config.layers for operation in _of_layer(layer))
    specs = [layer.attention for layer in config.layers]
    shapes = {(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) for spec in specs}
    return [*found, *([f"{len(shapes)} shapes of attention"] if len(shapes) > 1 else [])]


def _of_layer(layer: LayerSpec) -> list[str]:
    found = []
    for norms in (layer.attention_norms, layer.feed_forward_norms):
        found += ["norms after a branch"] if norms.after is not None else []
        found += ["norms of the residual stream after a branch"] if norms.of_sum is not None else []
    if layer.residual_multiplier != 1:
        found.append("residual multipliers")
    if layer.feed_forward.activation_kernel not in NATIVE_PROLOGUES:
        found.append(f"activation {layer.feed_forward.activation_kernel}")
    return found


def fallback_note(operations: list[str]) -> str:
    """Return the message for a model with these `torch_operations` under native kernels."""
    return (
        f"native kernels do not support {', '.join(operations)}: torch computes these operations, and decode steps are "
        f"not recorded"
    )
