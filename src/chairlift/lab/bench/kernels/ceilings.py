"""Measures the maximum speeds of this CPU with the threads of the kernels that are compared with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from chairlift.kernels.cpu.native_extension import NativeExtension

READ_BYTES: Final = 256 << 20
"""Size of the buffer that is read: larger than the caches."""

UNITS: Final = {
    "dot_u8s8": "8-bit dot products, GOP/s",
    "dot_u7s8": "8-bit by 7-bit dot products, GOP/s",
    "fma": "float32 multiply-adds, GFLOP/s",
    "tile_s8": "8-bit products in tiles, GOP/s",
    "tile_bf16": "bfloat16 products in tiles, GFLOP/s",
    "dot_bf16": "bfloat16 dot products, GFLOP/s",
}
"""The operations of kernels. `dot_u7s8` multiplies unsigned bytes below 128, which takes fewer instructions without
VNNI. Kernels that use no such instructions have no speed for them."""

READ: Final = "read"
"""The speed of reading memory, in bytes per second."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The minimum work of a kernel.

    Attributes:
        operations: number of additions and multiplications by unit, one of UNITS.
        num_bytes: number of bytes that are read.
        in_cache: the bytes were just written, so memory is no limit.
    """

    operations: Mapping[str, float] = field(default_factory=dict)
    num_bytes: float = 0.0
    in_cache: bool = False

    @property
    def num_operations(self) -> float:
        return sum(self.operations.values())

    def __add__(self, other: KernelWork) -> KernelWork:
        added = Counter(self.operations) + Counter(other.operations)
        return KernelWork(dict(added), self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Maximum speeds of the CPU: one sample, or the best or the median of many.

    Attributes:
        isa: the instruction set of the kernels.
        speeds: operations/s of a loop over each unit that the kernels use (see UNITS), and READ.
    """

    isa: str
    num_threads: int
    speeds: Mapping[str, float]

    def least_seconds(self, work: KernelWork) -> tuple[float, str] | None:
        """The seconds of the work at the ceilings, and the limit, "compute" or "memory"; None without a limit."""
        compute = sum(amount / self.speeds[unit] for unit, amount in work.operations.items())
        memory = 0.0 if work.in_cache else work.num_bytes / self.speeds[READ]
        if not compute and not memory:
            return None
        return (compute, "compute") if compute > memory else (memory, "memory")

    def to_dict(self) -> dict[str, Any]:
        return {"isa": self.isa, "num_threads": self.num_threads, **self.speeds}


def combine_ceilings(samples: Sequence[Ceilings], statistic: Callable[[list[float]], float]) -> Ceilings:
    """A statistic of each speed over measurements with the same threads."""
    values = {name: [each.speeds[name] for each in samples if name in each.speeds] for name in (*UNITS, READ)}
    speeds = {name: statistic(known) for name, known in values.items() if known}
    return Ceilings(samples[0].isa, samples[0].num_threads, speeds)


class CeilingMeter:
    """Measures the ceilings repeatedly, because the speed of a shared machine changes within seconds.

    Args:
        native: the native extension.
        seconds: time that `measure` takes for each ceiling.
        read_bytes: size of the buffer that is read.
    """

    def __init__(self, native: NativeExtension, seconds: float = 0.2, *, read_bytes: int = READ_BYTES) -> None:
        self._native = native
        self._seconds = seconds
        self._buffer = native.ReadBuffer(read_bytes)

    def measure(self) -> Ceilings:
        """Measure the best of many samples."""
        return self._measure(self._seconds)

    def sample(self) -> Ceilings:
        """Measure one sample of each ceiling, in about ten milliseconds."""
        return self._measure(0.0)

    def _measure(self, seconds: float) -> Ceilings:
        native = self._native
        speeds = {unit: native.measure_products(unit, seconds) for unit in UNITS}
        speeds[READ] = self._buffer.measure(seconds)
        return Ceilings(native.isa(), native.num_threads(), {name: speed for name, speed in speeds.items() if speed})
