"""Converts NumPy arrays to tensors on the device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device. On the CPU both share memory; other devices get an asynchronous copy."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
