"""A pytest mark for tests that require the native kernels, and properties of their instruction sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


ISAS: Final[list[str]] = [] if unavailable_reason() else load().available_isas()
"""The instruction sets of this CPU."""
ATTENTION_ISAS: Final = [isa for isa in ISAS if not isa.endswith("-vnni")]
"""Those that have their own attention; the others have that of another one."""
LOOP_ISAS: Final = [isa for isa in ATTENTION_ISAS if isa not in ROUNDING_TO_BF16]
"""Those that have their own sampling and recurrences, see `test_sets_that_change_another_one_keep_its_loops`."""


@contextmanager
def selected_isa(name: str) -> Iterator[str]:
    """Compute on an instruction set."""
    native = load()
    before = native.isa()
    native.set_isa(name)
    yield name
    native.set_isa(before)


needs_native = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
