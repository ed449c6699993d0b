"""Reads the parameters of the modules of sentence-transformers that follow the model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from chairlift.errors import ModelLoadError
from chairlift.models.pooling import RowStep


def load_row_step(step: RowStep, device: torch.device) -> dict[str, torch.Tensor]:
    """The parameters of a step in float32, by the names of their tensors.

    Raises:
        ModelLoadError: the file is missing or damaged, or a tensor is missing or has another shape.
    """
    file = Path(step.file)
    if not file.is_file():
        convert = "convert the pickled weights, which are never opened, with save_pretrained() of sentence-transformers"
        hint = convert if [*file.parent.glob("*.bin")] else "download it again"
        raise ModelLoadError(f"{file}: is missing; {hint}")
    try:
        found = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file}: cannot be read ({error}); download it again") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if shapes != (required := _shapes(step)):
        raise ModelLoadError(f"{file}: has tensors of the shapes {shapes}, and its config.json requires {required}")
    return {name: tensor.to(device, torch.float32) for name, tensor in found.items()}


def _shapes(step: RowStep) -> dict[str, tuple[int, ...]]:
    if step.kind == "layer_norm":
        return {"norm.weight": (step.size,), "norm.bias": (step.size,)}
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (step.size, step.num_inputs)}
    if step.has_bias:
        shapes["linear.bias"] = (step.size,)
    if step.has_residual and step.size != step.num_inputs:
        shapes["residual.weight"] = shapes["linear.weight"]
    return shapes
