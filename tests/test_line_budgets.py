"""Tests of the check of line budgets that `make check` runs."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

CHECK = Path(__file__).parent.parent / ".ci" / "line_budgets.py"


@pytest.fixture(scope="module")
def line_budgets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("line_budgets", CHECK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lines_are_counted_by_package(line_budgets: ModuleType, tmp_path: Path) -> None:
    for name, count in {
        "clock.py": 1,
        "core/a.py": 2,
        "core/kv/b.py": 3,
        "core/baselines/c.py": 4,
        "lab/d.py": 5,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x\n" * count)
    assert line_budgets.count_lines(tmp_path) == {"records": 1, "core": 5, "core/baselines": 4, "lab": 5}


def test_packages_that_exceed_their_budget_or_have_none_are_named(line_budgets: ModuleType) -> None:
    lines = Counter({"core": 10, "lab": 5, "new": 1})
    budgets = {"core": 9, "lab": 5, "old": 3, "product": 11, "total": 16}
    problems = line_budgets.find_problems(lines, budgets)
    assert [problem.split(" ", 1)[0] for problem in problems] == ["new", "old", "core"]
    assert "10 lines, and its budget is 9" in problems[-1]


def test_the_laboratory_is_not_part_of_the_product(line_budgets: ModuleType) -> None:
    lines = Counter({"core": 10, "lab": 5})
    assert line_budgets.find_problems(lines, {"core": 10, "lab": 5, "product": 10, "total": 15}) == []
    assert len(line_budgets.find_problems(lines, {"core": 10, "lab": 5, "product": 9, "total": 14})) == 2
