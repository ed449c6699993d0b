"""CPU time that one thread causes in other threads and processes, and the account that it is charged to.

with charge_cpu_time_to(account):      the CPU time of this thread is charged when the block ends
    with charge_process(pid): ...      the CPU time of a child process, while this thread waits for it
    submit(work, cpu_charge())         another thread, which charges the same account
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final, TypeAlias

CpuCharge: TypeAlias = Callable[[float], None]
"""Charges seconds of CPU time to an account. May be called on any thread."""


def _charge_to_no_account(_seconds: float) -> None:
    """Outside of a request CPU time is not accounted for."""


_CHARGE: Final[ContextVar[CpuCharge]] = ContextVar("cpu_charge", default=_charge_to_no_account)


def cpu_charge() -> CpuCharge:
    """The function that charges the account which this thread works for."""
    return _CHARGE.get()


@contextlib.contextmanager
def charge_cpu_time_to(charge: CpuCharge, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
    """Charge the CPU time of a block of code to an account, also if the block raises.

    Args:
        charge: called at the end of the block, and by code inside of it that uses other threads or processes.
        clock: seconds of CPU time of what runs the block: this thread, or the process (`time.process_time`).
    """
    token = _CHARGE.set(charge)
    started = clock()
    try:
        yield
    finally:
        _CHARGE.reset(token)
        charge(clock() - started)


@contextlib.contextmanager
def charge_process(pid: int) -> Iterator[None]:
    """Charge the CPU time that a process uses during a block of code to the account of this thread. The process may end
    meanwhile, but must not be waited for (`wait`) inside the block."""
    before = process_cpu_seconds(pid)
    try:
        yield
    finally:
        cpu_charge()(max(0.0, process_cpu_seconds(pid) - before))


def process_cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far; 0 if the process has ended."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3), which the standard library does not have
        return 0.0
    import psutil

    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
