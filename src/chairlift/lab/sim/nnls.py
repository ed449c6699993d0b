"""Least squares with coefficients that are not negative."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def non_negative_least_squares(matrix: Array, target: Array) -> Array:
    """x >= 0 that minimizes |matrix x - target|, by the active set method of Lawson and Hanson, Solving Least Squares
    Problems (1974), chapter 23.

    Args:
        matrix: [rows, columns], rows >= 1; target: [rows].

    Returns:
        [columns].
    """
    num_columns = matrix.shape[1]
    gram, moment = matrix.T @ matrix, matrix.T @ target
    tolerance = 1e-12 * max(1.0, float(np.abs(moment).max(initial=0.0)))
    x = np.zeros(num_columns)
    is_free = np.zeros(num_columns, dtype=bool)
    for _ in range(3 * num_columns):
        gain = np.where(is_free, -np.inf, moment - gram @ x)
        best = int(np.argmax(gain))
        if gain[best] <= tolerance:
            break
        is_free[best] = True
        x = _descend(gram, moment, x, is_free)
    return x


def _descend(gram: Array, moment: Array, x: Array, is_free: npt.NDArray[np.bool_]) -> Array:
    """Solve for the free coefficients; as long as that makes one negative, go there only as far as none is, and fix the
    one at 0 that stopped it. Changes `is_free`."""
    while True:
        wanted = np.zeros_like(x)
        free = np.flatnonzero(is_free)
        wanted[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free], rcond=None)[0]
        if not (wanted[free] <= 0).any():
            return wanted
        falling = free[wanted[free] <= 0]
        steps = x[falling] / (x[falling] - wanted[falling]).clip(min=np.finfo(float).tiny)
        x = x + float(steps.min()) * (wanted - x)
        x[falling[steps == steps.min()]] = 0.0
        is_free &= x > 0
        x[~is_free] = 0.0
