"""Accounting of the CPU time that a request uses in several threads and processes.

with charge_cpu_time_to(account):      charges the CPU time of this thread when the block ends
    with charge_process(pid): ...      charges the CPU time of a child process while this thread waits for it
    submit(work, cpu_charge())         lets another thread charge the same account
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final, TypeAlias

CpuCharge: TypeAlias = Callable[[float], None]
"""A function that charges seconds of CPU time to an account. It can be called on any thread."""


def _charge_to_no_account(_seconds: float) -> None:
    """Ignore CPU time that is used outside of a request."""


_CHARGE: Final[ContextVar[CpuCharge]] = ContextVar("cpu_charge", default=_charge_to_no_account)


def cpu_charge() -> CpuCharge:
    """The function that charges the account of the current context."""
    return _CHARGE.get()


@contextlib.contextmanager
def charge_cpu_time_to(charge: CpuCharge, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
    """Charge the CPU time of a block of code to an account, even if the block raises.

    Args:
        charge: Charges the account. It is called at the end of the block, and by code inside of the block that uses
            other threads or processes.
        clock: The CPU time in seconds of the thread, or of the process (`time.process_time`).
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
    """Charge the CPU time that a process uses during a block of code to the account of the current context.

    The process may end during the block, but it must not be reaped (`wait`) inside of the block.
    """
    before = process_cpu_seconds(pid)
    try:
        yield
    finally:
        cpu_charge()(max(0.0, process_cpu_seconds(pid) - before))


def process_cpu_seconds(pid: int) -> float:
    """Seconds of CPU time of all threads of a process; 0 if the process has ended."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return time.clock_gettime(~pid << 3 | 2)  # As clock_getcpuclockid(3).
        return 0.0
    import psutil

    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
