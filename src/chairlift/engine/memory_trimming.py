"""The memory of a process that has started and is going to serve for long."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Final

MADV_DONTNEED: Final = 4


def trim_memory() -> None:
    """Give back what only the start has needed, and spare later collections what stays: they would look through every
    imported module in the middle of a step."""
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc has it
            libc.malloc_trim(0)
        _release_code(libc)


def _release_code(libc: ctypes.CDLL) -> None:
    """Unmap the pages of all code; what is called again comes back from the page cache, some 10 us for 64 KiB.

    A library like torch runs most of its code once, to register it. Code is never written to, so nothing is lost.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _offset, _device, _inode, *path = line.split(maxsplit=5)
        if access == "r-xp" and path and path[0].startswith("/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
