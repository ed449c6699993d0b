"""Returns memory to the operating system after the start of a long-running process, and after large requests."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Final

MADV_DONTNEED: Final = 4
M_ARENA_MAX: Final = -8
M_MMAP_THRESHOLD: Final = -3
MAX_ARENAS: Final = 2

MMAP_BYTES: Final = 1 << 20
"""Allocations of this size are returned to the system when they are freed. By default glibc raises its limit to the
size of the largest one so far, and keeps the memory of later ones in its heaps."""


def limit_arenas() -> None:
    """Let all threads of this process share MAX_ARENAS heaps of glibc. Call it before the first thread is started.

    By default each thread has a separate heap, and memory that one thread has freed is not used by the others.
    Allocations of MMAP_BYTES or more are in none of these heaps.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_ARENA_MAX, MAX_ARENAS)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def trim_memory() -> None:
    """Return the memory that only the start has used, and exclude the remaining objects from garbage collection.

    A collection would otherwise visit every object of every imported module in the middle of a step. Objects that an
    earlier call has excluded are collected: the objects of an unloaded model are garbage by now.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    release_free_heaps()
    if sys.platform == "linux":
        _release_code_pages(ctypes.CDLL(None))


def release_free_heaps() -> None:
    """Return the free memory in the heaps of glibc to the system. By itself glibc returns only what is free at the end
    of a heap, where a single object of a few bytes keeps everything before it."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # only glibc has it
        libc.malloc_trim(0)


def _release_code_pages(libc: ctypes.CDLL) -> None:
    """Unmap the pages of all code. Pages that are executed again are mapped from the page cache (10 us per 64 KiB).

    A library such as torch executes most of its code once, to register it. Code is never written, so nothing is lost.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _offset, _device, _inode, *path = line.split(maxsplit=5)
        if access == "r-xp" and path and path[0].startswith("/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
