"""Checks that pure modules import no heavy package, in a new interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Collection, Sequence
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


def check_imports(modules: Sequence[str], heavy: Collection[str]) -> None:
    """Import modules one after another in a new interpreter, and check after each that nothing heavy is loaded."""
    code = f"""
import importlib, sys
for module in {list(modules)}:
    importlib.import_module(module)
    if loaded := set({sorted(heavy)}) & sys.modules.keys():
        sys.exit(f"{{module}} imports {{', '.join(sorted(loaded))}}")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_pure_modules_load_nothing_heavy() -> None:
    check_imports(PURE, HEAVY)


def test_simulation_and_its_numbers_need_no_torch() -> None:
    packages = [f"lab.{name}" for name in ("sim", "presets", "workload", "metrics")]
    modules = [
        f"chairlift.{package}.{module.name}"
        for package in packages
        for module in pkgutil.iter_modules([str(SOURCE.joinpath(*package.split(".")))])
    ]
    check_imports(modules, set(HEAVY) - {"numpy"})


def test_the_options_of_a_server_load_no_framework() -> None:
    check_imports(["chairlift.cli.serve", "chairlift.server.serve"], {"fastapi", "pydantic", "torch"})


def test_every_public_name_can_be_imported() -> None:
    for name in chairlift.__all__:
        assert getattr(chairlift, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = chairlift.nonsense
