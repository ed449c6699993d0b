"""The native kernel set before a model is loaded; importing this module does not load the extension."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.kernels.cpu import load, loaded
from chairlift.kernels.cpu.native_memory import NativeMemory
from chairlift.kernels.kernel_set import KernelSet

if TYPE_CHECKING:
    from chairlift.kernels.interface import Kernels
    from chairlift.kernels.sampling import SamplingKernels


class NativeKernelSet(KernelSet):
    """The compiled kernels for the CPU."""

    name = "native"

    @property
    def description(self) -> str:
        return f"{self.name} ({load().isa()})"

    @property
    def instruction_set(self) -> str | None:
        native = loaded()
        return None if native is None else native.isa()

    def check_available(self) -> None:
        load()

    def memory(self, dtype: str, device: str, quantization: str | None) -> NativeMemory:
        return NativeMemory(quantization)

    def make_kernels(self, quantization: str | None) -> Kernels:
        from chairlift.kernels.cpu.kernel_set import native_kernels

        return native_kernels(quantization)

    def make_sampling(self) -> SamplingKernels | None:
        from chairlift.kernels.cpu.sampling import NativeSampling

        return NativeSampling()

    @property
    def num_threads(self) -> int:
        native = loaded()
        return 0 if native is None else native.num_threads()

    def set_num_threads(self, num_threads: int) -> int:
        """Set the threads of the native kernels, and give torch one thread, so that they do not compete for CPUs."""
        import torch

        load().set_num_threads(num_threads)
        torch.set_num_threads(1)
        return num_threads
