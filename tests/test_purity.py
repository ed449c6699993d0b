"""Checks that pure modules import no heavy package, each in a new interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import chairlift

HEAVY = ("torch", "numpy", "transformers", "fastapi", "starlette", "pydantic", "tokenizers", "gguf", "safetensors")
VOCABULARY = (
    "errors",
    "clock",
    "system.output_files",
    "system.control_groups",
    "system.memory_limits",
    "config",
    "sampling_params",
    "structured_outputs",
    "request",
    "outputs",
    "events",
)
SOURCE = Path(chairlift.__file__).parent
PURE = [
    "chairlift",
    *(f"chairlift.{name}" for name in VOCABULARY),
    *(module.name for module in pkgutil.walk_packages([str(SOURCE / "core")], "chairlift.core.")),
]


@pytest.mark.parametrize("module", PURE)
def test_import_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


@pytest.mark.parametrize("package", ["lab.sim", "lab.presets", "lab.workload", "lab.workload.traces", "lab.metrics"])
def test_simulation_and_its_numbers_need_no_torch(package: str) -> None:
    folder = SOURCE.joinpath(*package.split("."))
    modules = [f"chairlift.{package}.{module.name}" for module in pkgutil.iter_modules([str(folder)])]
    heavy = tuple(name for name in HEAVY if name != "numpy")
    code = f"import sys, {', '.join(modules)}; print(*[name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def test_every_public_name_can_be_imported() -> None:
    for name in chairlift.__all__:
        assert getattr(chairlift, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = chairlift.nonsense
