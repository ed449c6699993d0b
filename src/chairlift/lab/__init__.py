"""Simulation, planning studies, workloads, benchmarks and reports; imported by `chairlift.cli.main` only.

Scripts import its names from here, such as `from chairlift.lab import RequestQueue, simulate`. They are loaded at the
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift.lab.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    public = import_module("chairlift.lab.public")
    if name not in public.__all__:
        raise AttributeError(f"module 'chairlift.lab' has no attribute {name!r}")
    return getattr(public, name)
