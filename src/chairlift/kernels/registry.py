"""Kernel sets by name. A set is imported when it is first needed, so that no other module depends on it."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Final, cast

from chairlift.errors import ConfigError
from chairlift.kernels.kernel_set import KernelSet

if TYPE_CHECKING:
    from chairlift.kernels.interface import Kernels

KERNEL_SETS: Final = {
    "native": "chairlift.kernels.cpu.native_set:NativeKernelSet",
    "reference": "chairlift.kernels.portable_set:ReferenceKernelSet",
    "torch": "chairlift.kernels.portable_set:TorchKernelSet",
}
"""Name of a kernel set -> the module and name of its `KernelSet`."""


@cache
def find_kernel_set(name: str) -> KernelSet:
    """The kernel set with this name.

    Raises:
        ConfigError: there is no such set.
    """
    if name not in KERNEL_SETS:
        raise ConfigError(f"kernels must be one of {', '.join(KERNEL_SETS)}, got {name!r}")
    module, _, kernel_set = KERNEL_SETS[name].partition(":")
    return cast(KernelSet, getattr(importlib.import_module(module), kernel_set)())


def get_kernels(name: str, quantization: str | None = None) -> Kernels:
    """The kernels of a set for one model; arguments and errors as for `find_kernel_set` and `make_kernels`."""
    return find_kernel_set(name).make_kernels(quantization)
