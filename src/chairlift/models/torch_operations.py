"""Which operations of a model's layers native kernels leave to torch."""

from __future__ import annotations

from chairlift.kernels.activations import has_native_kernel
from chairlift.models.config import ModelConfig
from chairlift.models.declaration import LayerSpec


def torch_operations(config: ModelConfig) -> list[str]:
    """What native kernels have no function for, each once; empty: they compute all layers, and their steps can be
    recorded."""
    found = dict.fromkeys(operation for layer in config.layers for operation in _of_layer(layer))
    specs = [layer.attention for layer in config.layers]
    shapes = {(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) for spec in specs}
    return [*found, *([f"planning for {len(shapes)} shapes of attention"] if len(shapes) > 1 else [])]


def _of_layer(layer: LayerSpec) -> list[str]:
    found = []
    for norms in (layer.attention_norms, layer.feed_forward_norms):
        found += ["norms of what a branch adds"] if norms.after is not None else []
        found += ["norms of sums"] if norms.of_sum is not None else []
    if layer.residual_multiplier != 1:
        found.append("residual multipliers")
    if not has_native_kernel(layer.feed_forward.activation_kernel):
        found.append(f"activation {layer.feed_forward.activation_kernel}")
    return found


def fallback_note(operations: list[str]) -> str:
    """The message for a model on native kernels with these operations."""
    return (
        f"native kernels have no function for {', '.join(operations)}: torch computes them, and decode steps are not "
        f"recorded"
    )
