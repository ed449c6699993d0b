"""trim_memory returns memory to the system, and the process continues to work."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import torch
from pathlib import Path
from chairlift.engine.memory_trimming import trim_memory

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

before = torch.arange(6.0).reshape(2, 3)
started = resident_mib()
trim_memory()
print(started - resident_mib(), (before @ before.T).tolist())
"""


ARENAS_CODE = """
import ctypes, threading
from pathlib import Path
from chairlift.engine.memory_trimming import limit_arenas

limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
start = threading.Barrier(8)

def allocate():
    start.wait()
    libc.malloc(1000)
    start.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(b"arenas.xml", b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(Path("arenas.xml").read_text().count("<heap nr="))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_all_threads_share_two_arenas(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ARENAS_CODE], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert 1 <= int(done.stdout) <= 2


PIECES_CODE = """
from pathlib import Path
from chairlift.engine.memory_trimming import limit_arenas, release_free_heaps

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

limit_arenas()
pieces = [bytes(size) for _ in range(1000) for size in (1 << 16, 1000)]
del pieces[::2]
before = resident_mib()
release_free_heaps()
print(before - resident_mib())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can return the middle of a heap")
def test_free_memory_between_used_blocks_is_returned() -> None:
    done = subprocess.run([sys.executable, "-c", PIECES_CODE], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 40


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
def test_trim_memory_returns_memory_of_a_working_process() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    saved, product = done.stdout.split(maxsplit=1)
    assert int(saved) > 10
    assert product.strip() == "[[5.0, 14.0], [14.0, 50.0]]"


COLLECTED_CODE = """
import weakref
from chairlift.engine.memory_trimming import trim_memory

class Model:
    def __init__(self):
        self.itself = self

model = Model()
is_alive = weakref.ref(model)
trim_memory()
del model
trim_memory()
print(is_alive())
"""


def test_objects_that_were_excluded_from_collection_are_collected_by_the_next_call() -> None:
    """In a process of its own, because a collection visits all objects of the tests."""
    done = subprocess.run([sys.executable, "-c", COLLECTED_CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
