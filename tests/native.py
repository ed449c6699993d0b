"""A pytest mark for tests that require the native kernels, and properties of their instruction sets."""

from __future__ import annotations

from typing import Final

import pytest

from chairlift.kernels.cpu import load
from chairlift.kernels.kernel_set import KernelsUnavailableError

ROUNDING_TO_BF16: Final = ("amx", "amx-emulated", "avx512-bf16")
"""Instruction sets that round activations to bfloat16 for products with bfloat16 weights, keys and values."""


def unavailable_reason() -> str | None:
    """The reason why the native kernels cannot be loaded, or None."""
    try:
        load()
    except KernelsUnavailableError as error:
        return str(error)
    return None


needs_native = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
