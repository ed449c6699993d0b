"""Compares the lines of Python in each package with its budget in line_budgets.toml, and fails if one is exceeded.

`make check` runs it. The budget of `core` does not include baselines, speculation and measuring, which have their own.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from pathlib import Path

CI = Path(__file__).parent
SOURCE = CI.parent / "src" / "chairlift"
PARTS = ("core/baselines", "core/measuring", "core/queues", "core/speculation")


def count_lines(source: Path) -> Counter[str]:
    """The lines of Python below `source` by package; `records` are the modules outside of packages."""
    lines: Counter[str] = Counter()
    for path in source.rglob("*.py"):
        folder = path.parent.relative_to(source).as_posix()
        package = next(
            (part for part in PARTS if folder == part or folder.startswith(f"{part}/")), folder.split("/")[0]
        )
        lines["records" if folder == "." else package] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def find_problems(lines: Counter[str], budgets: dict[str, int]) -> list[str]:
    """What exceeds its budget or has none, as sentences; `total` and `product` (all but `lab`) are sums."""
    sums = {"product": sum(lines.values()) - lines["lab"], "total": sum(lines.values())}
    counted = {**lines, **sums}
    missing = [f"{package} has no budget in .ci/line_budgets.toml" for package in counted if package not in budgets]
    unknown = [f"{package} has a budget, but no lines: remove it" for package in budgets if package not in counted]
    exceeded = [
        f"{package} has {counted[package]} lines, and its budget is {budget}: make it smaller, or raise the budget in "
        ".ci/line_budgets.toml and say so in the subject of the commit"
        for package, budget in budgets.items()
        if counted.get(package, 0) > budget
    ]
    return missing + unknown + exceeded


def main() -> int:
    """Print the lines and budgets, and return the exit status."""
    lines = count_lines(SOURCE)
    budgets = tomllib.loads((CI / "line_budgets.toml").read_text(encoding="utf-8"))["budgets"]
    for package, count in sorted(lines.items()):
        print(f"{package:20} {count:7,} of {budgets.get(package, 0):7,}")
    print(f"{'total':20} {sum(lines.values()):7,} of {budgets.get('total', 0):7,}")
    problems = find_problems(lines, budgets)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
