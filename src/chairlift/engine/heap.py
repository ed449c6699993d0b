"""The heap of a process that has started and is going to serve for long."""

from __future__ import annotations

import ctypes
import gc
import sys


def settle_heap() -> None:
    """Give back what only the start has needed, and spare later collections what stays: they would look through every
    imported module in the middle of a step."""
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)
