"""Launch: a Triton kernel with everything that decides which code it is compiled to.

The bits of a row must not depend on its batch. Triton compiles a kernel again for arguments that are 1 or divisible by
16, and the order of a sum depends on the number of warps and on such hints. So a kernel names its arguments that change
from step to step in `do_not_specialize`, sizes of the model are constants, and pointers are aligned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

ALIGNMENT: Final = 16
"""The bytes to which every tensor argument is aligned."""

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether the interpreter runs the kernels, on the CPU."""

PRODUCT_TYPES: Final = {
    torch.float32: tl.float32,
    torch.float16: tl.float32 if INTERPRETED else tl.float16,
    torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,
}
"""Type of activations -> the type of the operands of `tl.dot`. The interpreter computes with the bit patterns of
bfloat16 as if they were integers, so it gets float32."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its constants and options; each is one variant in `python -m benchmarks.gpu_compile`.

    Attributes:
        kernel: a function of `triton.jit`.
        constants: the values of its `tl.constexpr` parameters.
        types: those of Triton for its other parameters in their order: "*bf16" for a pointer, "i32".
        has_product: whether it contains `tl.dot`, which must become an instruction of the matrix units.
    """

    kernel: Any
    constants: Mapping[str, Any]
    types: tuple[str, ...]
    num_warps: int = 4
    num_stages: int = 2
    has_product: bool = False

    def __call__(self, grid: tuple[int, ...], *args: torch.Tensor | float) -> None:
        """Run the kernel once for each program of the grid. No program runs if the grid has none."""
        for arg, kind in zip(args, self.types, strict=True):
            if isinstance(arg, torch.Tensor):
                assert arg.data_ptr() % ALIGNMENT == 0
                assert pointer(arg.dtype) == kind
        if 0 in grid:
            return
        # The contraction of products and sums to FMA decides bits, so it does not depend on the version's default.
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        with torch.cuda.device_of(args[0]):  # type: ignore[no-untyped-call]  # Triton launches on the current device.
            self.kernel[grid](*args, **self.constants, **options)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether kernels can read x: its values follow each other, and its address is aligned."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that kernels can read: parameters that are mapped from a file may lie anywhere."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def pointer(dtype: torch.dtype) -> str:
    """Triton's type of a pointer to values of a type."""
    return f"*{POINTEES[dtype]}"


POINTEES: Final = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
