"""trim_memory returns memory to the system, and the process continues to work."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from chairlift.engine.memory_trimming import trim_memory

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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
def test_trim_memory_returns_memory_of_a_working_process() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    saved, product = done.stdout.split(maxsplit=1)
    assert int(saved) > 10
    assert product.strip() == "[[5.0, 14.0], [14.0, 50.0]]"


def test_objects_that_were_excluded_from_collection_are_collected_by_the_next_call() -> None:
    class Model:
        def __init__(self) -> None:
            self.itself = self

    model = Model()
    is_alive = weakref.ref(model)
    try:
        trim_memory()
        del model
        trim_memory()
        assert is_alive() is None
    finally:
        gc.unfreeze()
