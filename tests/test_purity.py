"""Checks that modules import no heavy package, in a new interpreter, and that imports have no cycles."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
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


SIMULATION = [
    f"chairlift.lab.{package}.{module.name}"
    for package in ("sim", "presets", "workload", "metrics")
    for module in pkgutil.iter_modules([str(SOURCE.joinpath("lab", *package.split(".")))])
]
PLANNING = ["chairlift.lab.planning.planner", "chairlift.lab.planning.plan_report"]
SERVER_OPTIONS = ["chairlift.cli.serve", "chairlift.server.serve"]
FRONT_END = [
    f"chairlift.{name}" for name in ("engine.async_llm", "engine.process.process_client", "server.application")
]


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (PURE, HEAVY),
        (SIMULATION, {*HEAVY} - {"numpy"}),
        (PLANNING, {"torch"}),
        (SERVER_OPTIONS, {"fastapi", "pydantic", "torch"}),
        ([*FRONT_END, *SERVER_OPTIONS], {"torch", "numpy", "gguf", "safetensors"}),
        (["chairlift.cli.main", "chairlift.server.serve", "chairlift.cluster"], {"ray"}),
    ],
    ids=["pure", "simulation", "planning", "options", "front end", "without replicas"],
)
def test_modules_load_nothing_heavy(modules: Sequence[str], heavy: Collection[str]) -> None:
    check_imports(modules, heavy)


def test_every_public_name_can_be_imported() -> None:
    for name in chairlift.__all__:
        assert getattr(chairlift, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = chairlift.nonsense


def find_cycle(imports: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return None


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None


def test_no_modules_import_each_other_in_a_cycle() -> None:
    graph = grimp.build_graph("chairlift", exclude_type_checking_imports=True, cache_dir=None)
    if (
        cycle := find_cycle({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    ) is not None:
        pytest.fail(" -> ".join(cycle))
