"""KernelSet: a kernel set before a model is loaded: whether this machine can load it, and what it makes; and all sets
by name.

This module and the sets that it describes load without torch, so that planning does not need it. A set is imported when
it is first needed, so that no other module depends on it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING, Final, cast

from chairlift.errors import ConfigError
from chairlift.kernels.kernel_memory import KernelMemory

if TYPE_CHECKING:
    from chairlift.kernels.interface import Kernels
    from chairlift.kernels.sampling import SamplingKernels

MAX_THREADS: Final = 256
"""The maximum number of threads of a kernel set, which the extension of the native kernels enforces as well."""


class KernelsUnavailableError(ConfigError):
    """A kernel set cannot be loaded; the message gives the reason and the remedy."""


class KernelSet(ABC):
    """A named set of kernels.

    Attributes:
        name: a value of `EngineConfig.kernels`, or the name of a set of the tests.
    """

    name: str

    @property
    def description(self) -> str:
        """The name, with the instruction set if the set was compiled for several: "native (avx512-vnni)"."""
        return self.name

    def check_available(self) -> None:
        """Load what the set needs beside Python packages.

        Raises:
            KernelsUnavailableError: this machine cannot load it.
        """
        return

    @abstractmethod
    def memory(self, dtype: str, device: str, quantization: str | None) -> KernelMemory:
        """The memory that the set needs.

        Args:
            dtype: the type of activations, a key of DTYPE_BYTES.
            device: "cpu" or "cuda".
            quantization: as for `make_kernels`.
        """

    @abstractmethod
    def make_kernels(self, quantization: str | None) -> Kernels:
        """The kernels for one model.

        Args:
            quantization: the format of all matrices; None for the formats of the file.

        Raises:
            KernelsUnavailableError: this machine cannot load the set.
        """

    def make_sampling(self) -> SamplingKernels | None:
        """The kernels that choose tokens; None if the set has none, and torch's kernels are used."""
        return None

    def running(self) -> tuple[str, int] | None:
        """The instruction set and the number of threads of a compiled set that this process has loaded, else None."""
        return None

    @abstractmethod
    def set_num_threads(self, num_threads: int) -> int:
        """Set the number of threads that compute.

        Returns:
            The number of threads that may call torch at the same time, because torch itself computes with one thread;
            otherwise 1.
        """


KERNEL_SETS: Final = {
    "native": "chairlift.kernels.cpu.native_set:NativeKernelSet",
    "torch": "chairlift.kernels.torch_set:TorchKernelSet",
    "triton": "chairlift.kernels.triton.triton_set:TritonKernelSet",
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
