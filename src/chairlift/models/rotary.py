"""The tables of cosines and sines of rotary embeddings."""

from __future__ import annotations

import math

import torch

from chairlift.errors import ModelLoadError
from chairlift.models.declaration import RopeConfig


def rotary_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """Compute the cosines and then the sines of positions 0 to max_positions - 1, float32 [max_positions, head_dim].

    Raises:
        ModelLoadError: The scaling is not supported.
    """
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), _frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """The scaled frequency theta ** (-2i / head_dim) of each pair i of dimensions, in radians per position."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling == "none":
        return frequencies
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _stretch_llama3(frequencies, rope)
    if rope.scaling == "factors":
        return frequencies / torch.tensor(rope.freq_factors)
    raise ModelLoadError(f"rope scaling must be none, linear, llama3 or factors; got {rope.scaling!r}")


def _stretch_llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Scale frequencies as Llama 3.1 does.

    A wavelength that fits `high_freq_factor` times or more into the original context is unchanged. One that fits
    `low_freq_factor` times or less becomes `factor` times as long. Frequencies in between are interpolated.
    """
    fits = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((fits - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / rope.factor)
