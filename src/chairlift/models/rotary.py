"""The tables of cosines and sines of rotary embeddings."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from chairlift.errors import ModelLoadError
from chairlift.models.declaration.attention_spec import RopeConfig

EXTRA_POSITIONS: Final = 1024


class RotaryTable:
    """The cosines and sines of a rotary embedding, which are computed when a sequence first reaches their position.

    The memory of positions that no sequence has reached is allocated, but not resident: at 128K positions and heads of
    256 a table has 128 MiB.

    Attributes:
        values: float32 [max_positions, rotated dimensions], the cosines and then the sines of each position; always in
            the same memory.
        query_scales: float32 [max_positions], the factor of the query at each position; None without
            `query_scaling_beta`.

    Args:
        longest: the length of the longest sequence, which determines the factors of LongRoPE; None for max_positions.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device, longest: int | None = None
    ) -> None:
        num_dims = rope.num_dims(head_dim)
        # Unlike torch, numpy leaves it to the system to clear a page when it is first used.
        self.values = torch.from_numpy(np.zeros((max_positions, num_dims), dtype=np.float32)).to(device)
        self.query_scales = _query_scales(rope, max_positions).to(device) if rope.scales_queries else None
        self._rope = rope
        self._longest = longest or max_positions
        self._num_computed = 0

    def extend(self, num_positions: int) -> None:
        """Compute positions 0 to num_positions - 1, and some more, so that few steps have to.

        Raises:
            ModelLoadError: the scaling is not supported.
        """
        if num_positions <= self._num_computed:
            return
        first, end = self._num_computed, min(num_positions + EXTRA_POSITIONS, len(self.values))
        frequencies = _frequencies(self._rope, self.values.shape[1], self._longest)
        angles = torch.outer(torch.arange(first, end, dtype=torch.float32), frequencies)
        self.values[first:end] = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(self._rope.attention_factor)
        self._num_computed = end


def _query_scales(rope: RopeConfig, max_positions: int) -> torch.Tensor:
    periods = torch.arange(max_positions) // rope.original_max_position_embeddings
    return 1 + rope.query_scaling_beta * torch.log1p(periods.float())


def rotary_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """Return the values of a complete `RotaryTable`."""
    table = RotaryTable(rope, head_dim, max_positions, device)
    table.extend(max_positions)
    return table.values


def _frequencies(rope: RopeConfig, num_dims: int, longest: int) -> torch.Tensor:
    """The scaled frequency theta ** (-2i / num_dims) of each pair i of dimensions, in radians per position."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, num_dims, 2, dtype=torch.float32) / num_dims)
    if rope.scaling == "none":
        return frequencies
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _stretch_llama3(frequencies, rope)
    if rope.scaling == "factors":
        return frequencies / torch.tensor(rope.freq_factors)
    if rope.scaling == "yarn":
        return _interpolate_yarn(frequencies, rope)
    if rope.scaling == "longrope":
        is_long = longest > rope.original_max_position_embeddings
        return frequencies / torch.tensor(rope.long_factors if is_long else rope.freq_factors)
    raise ModelLoadError(f"rope scaling must be none, linear, llama3, factors, yarn or longrope; got {rope.scaling!r}")


def _interpolate_yarn(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Scale frequencies as YaRN does (Peng et al., 2023, section 3.2).

    A dimension that rotates `beta_fast` times or more within the original context is unchanged. One that rotates
    `beta_slow` times or less is slowed down by `factor`. Frequencies in between are interpolated by dimension.
    """
    num_pairs = len(frequencies)
    if rope.theta <= 1:
        raise ModelLoadError(f"rope_theta must be above 1 with yarn, got {rope.theta:g}")
    low, high = (_pair_of(rotations, rope, num_pairs) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(num_pairs, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies * (1.0 - slowed + slowed / rope.factor)


def _pair_of(rotations: float, rope: RopeConfig, num_pairs: int) -> float:
    """The pair of dimensions that rotates this number of times within the original context."""
    wavelengths = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return num_pairs * math.log(wavelengths) / math.log(rope.theta)


def _stretch_llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Scale frequencies as Llama 3.1 does.

    A wavelength that fits `high_freq_factor` times or more into the original context is unchanged. One that fits
    `low_freq_factor` times or less becomes `factor` times as long. Frequencies in between are interpolated.
    """
    fits = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((fits - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / rope.factor)
