"""Measures the maximum speeds of this CPU with the threads of the kernels that are compared with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from chairlift.kernels.cpu.native_extension import NativeExtension

READ_BYTES: Final = 256 << 20
"""Size of the buffer that is read: larger than the caches."""

UNITS: Final = ("dot_u8s8", "dot_u7s8", "fma", "tile_s8", "tile_bf16", "dot_bf16")
"""The operations of kernels, fields of `Ceilings`: sums of products of bytes, the same with unsigned bytes below 128
(which takes fewer instructions without VNNI), float32 multiply-adds, products of bytes and of bfloat16 in tiles, and
products of pairs of bfloat16."""


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
        units = {**self.operations, **other.operations}
        added = {unit: self.operations.get(unit, 0.0) + other.operations.get(unit, 0.0) for unit in units}
        return KernelWork(added, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Maximum speeds of the CPU: one sample, or the best or the median of many.

    Attributes:
        isa: the instruction set of the kernels.
        dot_u8s8, dot_u7s8, fma: operations/s of a loop over one unit (see UNITS).
        tile_s8, tile_bf16, dot_bf16: the same; None if the kernels use no such instructions.
        read: bytes/s of reading memory.
    """

    isa: str
    num_threads: int
    dot_u8s8: float
    dot_u7s8: float
    fma: float
    read: float
    tile_s8: float | None = None
    tile_bf16: float | None = None
    dot_bf16: float | None = None

    def least_seconds(self, work: KernelWork) -> tuple[float, str] | None:
        """The seconds of the work at the ceilings, and the limit, "compute" or "memory"; None without a limit."""
        compute = sum(amount / getattr(self, unit) for unit, amount in work.operations.items())
        memory = 0.0 if work.in_cache else work.num_bytes / self.read
        if not compute and not memory:
            return None
        return (compute, "compute") if compute > memory else (memory, "memory")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def combine_ceilings(samples: Sequence[Ceilings], statistic: Callable[[list[float]], float]) -> Ceilings:
    """A statistic of each speed over measurements with the same threads; None for a speed that no measurement has."""
    speeds: dict[str, float] = {}
    for name in (*UNITS, "read"):
        if known := [value for sample in samples if (value := getattr(sample, name)) is not None]:
            speeds[name] = statistic(known)
    return Ceilings(samples[0].isa, samples[0].num_threads, **speeds)


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
        products = {unit: native.measure_products(unit, seconds) for unit in UNITS}
        return Ceilings(
            isa=native.isa(),
            num_threads=native.num_threads(),
            read=self._buffer.measure(seconds),
            **{unit: speed for unit, speed in products.items() if speed},
        )
