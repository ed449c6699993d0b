"""Counter-based random numbers: one uniform double for each pair of a seed and the position of a token.

A draw is a pure function of this pair, so it does not depend on other requests, on the row, on chunks or preemption,
and there is no generator state to save and restore. The mixing function is the finalizer of SplitMix64 (Steele, Lea and
Flood, OOPSLA'14, figure 17). It is applied to the seed first, so that consecutive seeds have different streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)

# With 52 instead of 53 bits, u * x < x after rounding for every normal x > 0, so a draw never exceeds the total.
_UNUSED_BITS = np.uint64(12)
_UNIT = 2.0**-52


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> _SHIFT_30)) * _MIX_1
    x = (x ^ (x >> _SHIFT_27)) * _MIX_2
    return x ^ (x >> _SHIFT_31)


def stream_key(seed: int) -> np.uint64:
    """The key of a request's random stream. Seeds are taken modulo 2**64."""
    mixed: np.uint64 = _mix(np.array([(seed + _GAMMA) & _MASK], dtype=np.uint64))[0]
    return mixed


def uniform(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
    """Uniform float64 numbers in [0, 1), one for each pair of key and position."""
    counters = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    return (_mix(keys + counters) >> _UNUSED_BITS).astype(np.float64) * _UNIT
