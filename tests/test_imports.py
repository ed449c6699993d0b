"""Checks that imports have no cycles, and that serving does not import the laboratory."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


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
