"""Times calls on a device, and measures its ceilings: the bandwidth of a copy and the speed of a large product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Final

import torch

FLUSHED_BYTES: Final = 256 << 20
"""Size of a buffer that is written before each call, so that no cache holds the arguments of the call before."""

WARM_UPS: Final = 3
"""Unmeasured calls of a device that compiles."""


class CallTimer:
    """Times single calls: with events on a GPU, where the buffer that is written before each call also hides the time
    of its launch; with the clock of the process on the CPU, for which the results mean nothing."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.rounds = rounds
        self._is_gpu = device.type == "cuda"
        self._flushed = torch.empty(FLUSHED_BYTES if self._is_gpu else 0, dtype=torch.uint8, device=device)

    def seconds(self, call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
        """The median time of a call in seconds, without that of `prepare` before each call."""
        for _ in range(WARM_UPS if self._is_gpu else 0):
            call()
        return median(self._once(call, prepare) for _ in range(self.rounds))

    def _once(self, call: Callable[[], object], prepare: Callable[[], object]) -> float:
        prepare()
        if not self._is_gpu:
            start = perf_counter()
            call()
            return perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._flushed.zero_()
        first.record()
        call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured speeds that kernels are compared with.

    Attributes:
        bytes_per_s: bytes that a copy reads and writes.
        flops_per_s: operations of a square product by torch in the type of the activations.
    """

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measure(cls, timer: CallTimer, dtype: torch.dtype) -> Ceilings:
        is_gpu = timer.device.type == "cuda"
        num_bytes, size = (1 << 30, 8192) if is_gpu else (1 << 20, 128)
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=timer.device)
        target = torch.empty_like(source)
        copied = 2 * num_bytes / timer.seconds(lambda: target.copy_(source))
        a, b = (torch.randn(size, size, device=timer.device).to(dtype) for _ in range(2))
        return cls(copied, 2 * size**3 / timer.seconds(lambda: a @ b))

    def least_seconds(self, num_bytes: float, num_flops: float) -> tuple[float, str]:
        """The time of this work at the ceilings, and which of them limits it."""
        return max((num_bytes / self.bytes_per_s, "memory"), (num_flops / self.flops_per_s, "compute"))
