"""What this CPU can do at most, measured beside what is compared with it, on the same threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any, Final

import torch

from chairlift.kernels.cpu.native_extension import NativeExtension

READ_BYTES: Final = 256 << 20
"""Of the buffer that is read: more than a cache holds."""

GEMM_SIZE: Final = 2048

UNITS: Final = ("dot_u8s8", "dot_u4s8", "fma")
"""What kernels compute with: sums of products of bytes, the same where one of the two is below 16 (which instruction
sets without VNNI do in fewer instructions), and float32 multiply-adds. Fields of `Ceilings`."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What a kernel has to do, at least.

    Attributes:
        operations: additions and multiplications by unit, one of UNITS.
        num_bytes: that are read.
        in_cache: they were written just before, so memory is no limit.
    """

    operations: Mapping[str, float] = field(default_factory=dict)
    num_bytes: float = 0.0
    in_cache: bool = False

    @property
    def num_operations(self) -> float:
        return sum(self.operations.values())

    def __add__(self, other: KernelWork) -> KernelWork:
        units = {**self.operations, **other.operations}
        added = {unit: self.operations.get(unit, 0.0) + other.operations.get(unit, 0.0) for unit in units}
        return KernelWork(added, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of one moment, or the best or the median of many, with the vector instructions that the kernels use.

    Attributes:
        isa: the instruction set.
        dot_u8s8, dot_u4s8, fma: operations/s of loops of nothing else, see UNITS.
        read: bytes/s.
        onednn_int8, onednn_fp32: operations/s of torch's square product of GEMM_SIZE, for comparison; None: torch has
            no such product here.
    """

    isa: str
    num_threads: int
    dot_u8s8: float
    dot_u4s8: float
    fma: float
    read: float
    onednn_int8: float | None = None
    onednn_fp32: float | None = None

    def least_seconds(self, work: KernelWork) -> tuple[float, str] | None:
        """What the work would take if nothing stood in its way, and what limits it: "compute" or "memory". None: no
        ceiling does."""
        compute = sum(amount / getattr(self, unit) for unit, amount in work.operations.items())
        memory = 0.0 if work.in_cache else work.num_bytes / self.read
        if not compute and not memory:
            return None
        return (compute, "compute") if compute > memory else (memory, "memory")

    def best_of(self, other: Ceilings) -> Ceilings:
        """The higher ones of two measurements on the same threads."""
        pairs = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        best: dict[str, Any] = {
            name: b if a is None else a if b is None else max(a, b) for name, (a, b) in pairs.items()
        }
        return Ceilings(**best)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def median_ceilings(samples: Sequence[Ceilings]) -> Ceilings:
    """Of one measurement, field by field, without oneDNN's."""
    middle = {name: median(getattr(sample, name) for sample in samples) for name in (*UNITS, "read")}
    return Ceilings(samples[0].isa, samples[0].num_threads, **middle)


class CeilingMeter:
    """Measures again and again, with the threads that the kernels have: what a shared machine can do changes from
    second to second.

    Args:
        native: the extension.
        seconds: that `measure` takes for each ceiling.
        read_bytes: of the buffer that is read.
    """

    def __init__(self, native: NativeExtension, seconds: float = 0.2, *, read_bytes: int = READ_BYTES) -> None:
        self._native = native
        self._seconds = seconds
        self._buffer = native.ReadBuffer(read_bytes)

    def measure(self) -> Ceilings:
        """The best of many samples, with oneDNN's."""
        threads = self._native.num_threads()
        return replace(
            self._own(self._seconds),
            onednn_int8=_gemm_speed(torch.int8, torch._int_mm, threads, self._seconds),
            onednn_fp32=_gemm_speed(torch.float32, torch.mm, threads, self._seconds),
        )

    def sample(self) -> Ceilings:
        """One sample of each: some ten milliseconds."""
        return self._own(0.0)

    def _own(self, seconds: float) -> Ceilings:
        native = self._native
        return Ceilings(
            isa=native.isa(),
            num_threads=native.num_threads(),
            dot_u8s8=native.measure_dot_u8s8(seconds),
            dot_u4s8=native.measure_dot_u4s8(seconds),
            fma=native.measure_fma(seconds),
            read=self._buffer.measure(seconds),
        )


def _gemm_speed(
    dtype: torch.dtype, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], threads: int, seconds: float
) -> float | None:
    """Operations/s of a square product in torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = (torch.randint(-9, 9, (GEMM_SIZE, GEMM_SIZE), dtype=torch.int8).to(dtype) for _ in range(2))
        best, end = _seconds(lambda: product(a, b)), time.perf_counter() + seconds
        while time.perf_counter() < end:
            best = min(best, _seconds(lambda: product(a, b)))
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        torch.set_num_threads(before)
    return 2 * GEMM_SIZE**3 / best


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
