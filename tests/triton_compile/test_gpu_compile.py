"""Triton kernels compiled for GPUs, without a GPU: each kernel of the set, and what the compile table must find."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from benchmarks.gpu_compile import ARCHITECTURES, Variant, compile_variant, find_variants  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from chairlift.errors import ConfigError  # noqa: E402
from chairlift.kernels.triton.launch import INTERPRETED, Launch  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")


@triton.jit
def product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, 64)
    acc = tl.zeros((M, N), tl.float32)
    for first in range(0, K, 64):
        x = tl.load(a + rows[:, None] * K + first + inner[None, :])
        y = tl.load(b + (first + inner[:, None]) * N + columns[None, :])
        acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.store(out + rows[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["n"])
def scaled(x, out, n, factor, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index, mask=index < n) * factor, mask=index < n)


@triton.jit
def count(out, n):
    tl.store(out, n)


def product_launch(m: int, n: int, dtype: str = "bf16") -> Launch:
    return Launch(product, {"M": m, "N": n, "K": 1024}, (f"*{dtype}",) * 3, has_product=True)


SCALED = Launch(scaled, {"BLOCK": 1024}, ("*fp32", "*fp32", "i32", "fp32"), num_warps=2)


def problems(launch: Launch, arch: str) -> list[str]:
    return list(compile_variant(launch, arch).problems(arch, launch.has_product))


def variants_of_each_kernel() -> Iterator[Variant]:
    """The first variant of each kernel, for an older and a newer architecture."""
    for arch in ("sm_80", "sm_90"):
        first = {(variant.module, variant.kernel): variant for variant in reversed(find_variants([arch]))}
        yield from first.values()


@pytest.mark.parametrize("variant", [*variants_of_each_kernel()], ids=lambda variant: f"{variant.name}-{variant.arch}")
def test_each_kernel_compiles_without_spills_within_the_limits(variant: Variant) -> None:
    compiled = variant.compiled()
    assert compiled.problems == ()
    assert compiled.facts is not None


@pytest.mark.parametrize(
    ("arch", "instruction"),
    [("sm_80", "mma.sync"), ("sm_90", "wgmma.mma_async"), ("sm_100", "tcgen05.mma"), ("gfx942", "v_mfma_f32")],
)
def test_a_product_has_the_matrix_instruction_of_the_architecture(arch: str, instruction: str) -> None:
    facts = compile_variant(product_launch(64, 64), arch)
    assert facts.matrix_instruction is not None
    assert facts.matrix_instruction.startswith(instruction)
    assert facts.wide_loads > 0
    assert facts.registers > 32
    assert list(facts.problems(arch, has_product=True)) == []


def test_a_product_of_float32_has_no_matrix_instruction() -> None:
    assert problems(product_launch(32, 32, "fp32"), "sm_90") == ["a product without matrix instructions"]


def test_tensor_memory_that_is_too_large_makes_the_code_a_trap() -> None:
    found = problems(product_launch(256, 512), "sm_100")
    assert "the code is only a trap" in found
    assert "1,024 columns of tensor memory, of at most 512" in found


def test_spills_and_too_much_shared_memory_are_found() -> None:
    facts = compile_variant(replace(product_launch(64, 256), num_warps=1, num_stages=4), "sm_86")
    first, second = facts.problems("sm_86", has_product=True)
    assert "bytes of stack" in first
    assert second.endswith(f"bytes of shared memory, of at most {ARCHITECTURES['sm_86'].shared_bytes:,}")


def test_a_number_that_changes_the_code_is_rejected() -> None:
    with pytest.raises(ConfigError, match="n is not in do_not_specialize"):
        compile_variant(Launch(count, {}, ("*i32", "i32")), "sm_90")


def test_an_error_of_the_compiler_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def variants() -> Iterator[tuple[str, Launch]]:
        yield "odd", product_launch(48, 64)

    monkeypatch.setattr("chairlift.kernels.triton.launch.variants", variants, raising=False)
    compiled = Variant("chairlift.kernels.triton.launch", "product", "odd", "sm_90").compiled()
    assert compiled.facts is None
    assert "power of 2" in compiled.problems[0]


class Device:
    """A driver of a GPU that is not there."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


class Compilation:
    """A kernel that is compiled for its arguments instead of launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.code = b""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            self.code = self._kernel.warmup(*args, grid=grid, **options).asm["cubin"]

        return run


@pytest.mark.parametrize("num_rows", [1, 16, 33])
def test_the_compiled_code_is_what_a_launch_compiles(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every value of an argument that changes from step to step."""
    monkeypatch.setattr(driver, "_active", Device())
    monkeypatch.setitem(os.environ, "TRITON_DISABLE_LINE_INFO", "1")
    compilation = Compilation(scaled)
    x = torch.empty(4096)
    replace(SCALED, kernel=compilation)((4,), x, x, num_rows, 0.5)
    assert hashlib.sha256(compilation.code).hexdigest() == compile_variant(SCALED, "sm_90").sha256
