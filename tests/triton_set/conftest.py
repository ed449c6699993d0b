"""Tests of the Triton kernels, which the interpreter runs on the CPU: `make test-triton`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without the interpreter the kernels need a GPU, and their modules need triton."""
    return None if IS_INTERPRETED or collection_path.name == "conftest.py" else True


@pytest.fixture(autouse=True)
def _needs_interpreter() -> None:
    assert IS_INTERPRETED
