"""Rotary position embedding: its frequencies, and the table of cosines and sines."""

from __future__ import annotations

import math

import torch

from chairlift.kernels.backend import RotaryStep


class RotaryEmbedding:
    """The cosines and sines of positions 0 to max_positions - 1, float32 (Su et al., 2021).

    Args:
        frequencies: float32 [head_dim / 2], radians per position.
    """

    def __init__(self, frequencies: torch.Tensor, max_positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> RotaryStep:
        """The rotary embedding of one step, at int64 positions [T]."""
        return RotaryStep(positions, self.cos_sin_cache)


def rope_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """The frequency theta ** (-2i / head_dim) of each pair i of dimensions: float32 [head_dim / 2]."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def stretch_llama3(
    frequencies: torch.Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: int,
) -> torch.Tensor:
    """Scale frequencies as Llama 3.1 does.

    A wavelength that fits `high_freq_factor` times or more into the original context is unchanged. One that fits
    `low_freq_factor` times or less becomes `factor` times as long. Frequencies in between are interpolated.
    """
    fits = original_max_positions * frequencies / (2 * math.pi)
    keep = ((fits - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / factor)
