"""benchmarks/simulator_speed.py with a few seconds of arrivals: every event sink gives the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "simulator_speed.py"


def test_every_sink_sees_the_same_run() -> None:
    options = ["--hours", "0.002", "--repeats", "1", "--sinks", "none,tally,file", "--kv", "oracle"]
    run = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=True)
    record = json.loads(run.stdout.splitlines()[-1])
    rows = record["rows"]
    assert [row["sink"] for row in rows] == ["none", "tally", "file"]
    assert len({(row["num_steps"], row["simulated_seconds"]) for row in rows}) == 1
    assert rows[0]["num_steps"] > 0
    assert all(row["wall_seconds"]["median"] > 0 for row in rows)
