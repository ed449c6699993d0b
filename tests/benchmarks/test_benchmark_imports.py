"""Every module below benchmarks/ can be imported, so that no script uses a name that has been moved or removed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
OTHER_ENGINES: Final = ("llama_cpp", "openvino", "openvino_genai", "vllm")
"""Packages of engines that are compared with Chairlift, which are in environments of their own."""

MODULES: Final = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "benchmarks").rglob("*.py")
)


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OTHER_ENGINES:
            raise
        pytest.skip(f"{error.name} is not installed")
