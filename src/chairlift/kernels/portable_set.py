"""The kernel sets that need no extension module: "torch" and its definition, "reference"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.kernels.kernel_set import KernelSet
from chairlift.kernels.torch_memory import TorchMemory

if TYPE_CHECKING:
    from chairlift.kernels.interface import Kernels


class TorchKernelSet(KernelSet):
    """The fast kernels of torch, for every device."""

    name = "torch"

    def memory(self, dtype: str, device: str, quantization: str | None) -> TorchMemory:
        return TorchMemory(dtype, device, packs=self.name == "torch")

    def make_kernels(self, quantization: str | None) -> Kernels:
        from chairlift.kernels.portable import PORTABLE_KERNELS

        assert quantization is None, "only native kernels quantize"
        return PORTABLE_KERNELS[self.name]

    def set_num_threads(self, num_threads: int) -> int:
        import torch

        torch.set_num_threads(num_threads)
        return 1


class ReferenceKernelSet(TorchKernelSet):
    """The reference implementation, which is slow."""

    name = "reference"
