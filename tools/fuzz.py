"""The long run of the fuzz targets. The time is divided among them, and each runs in rounds with new seeds.

    python -m tools.fuzz [--minutes 5 | --cases 2000] [--seed N] [--target NAME]

It prints a table and, as the last line, JSON. It ends with status 1 at the first case that fails, which Hypothesis
reduces and the seed reproduces.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.fuzz_models import model_targets
from tools.fuzz_settings import settings_targets
from tools.fuzz_targets import Target, run_cases
from tools.fuzz_wire import wire_targets

CASES_A_ROUND = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="the time for all targets together (default: 5)")
    parser.add_argument("--cases", type=int, help="the number of cases of each target, instead of a time")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the first round (default: 1)")
    parser.add_argument("--target", help="run only this target")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        targets = [*model_targets(Path(folder)), *settings_targets(Path(folder)), *wire_targets()]
        chosen = [target for target in targets if options.target in (None, target.name)]
        if not chosen:
            parser.error(f"--target must be one of {', '.join(target.name for target in targets)}")
        seconds = {
            target.name: _run(target, 60 * options.minutes / len(chosen), options.cases, options.seed)
            for target in chosen
        }
    _print(chosen, seconds, options.seed)


def _run(target: Target, budget: float, num_cases: int | None, seed: int) -> float:
    started = time.monotonic()
    while time.monotonic() - started < budget if num_cases is None else target.num_cases < num_cases:
        print(f"{target.name}: seed {seed}", file=sys.stderr)
        run_cases(target, CASES_A_ROUND, seed)
        seed += 1
    return time.monotonic() - started


def _print(targets: list[Target], seconds: dict[str, float], seed: int) -> None:
    table = Table("target", "cases", "seconds", "outcomes", title="Fuzzing: no failure")
    for target in targets:
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(target.outcomes.items()))
        table.add_row(target.name, str(target.num_cases), f"{seconds[target.name]:.0f}", ended)
    Console(width=120).print(table)
    cases = {target.name: target.outcomes for target in targets}
    print(json.dumps({"fuzz": cases, "first_seed": seed, "seconds": round(sum(seconds.values()), 1)}))


if __name__ == "__main__":
    main()
