"""Every module below benchmarks/ can be imported, so that no script uses a name that has been moved or removed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
NOT_INSTALLED: Final = ("llama_cpp", "openvino", "openvino_genai", "triton", "vllm", "xllamacpp")
"""Packages that are in environments of their own: engines that are compared with Chairlift, and triton."""

MODULES: Final = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "benchmarks").rglob("*.py")
)


def test_benchmarks_can_be_imported() -> None:
    errors = {}
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            if not (isinstance(error, ModuleNotFoundError) and error.name in NOT_INSTALLED):
                errors[name] = repr(error)
    assert errors == {}
