"""Plan a deployment: how many requests run at the same time in a given amount of memory.

python examples/plan.py
"""

import json
import subprocess
import sys
from typing import Any


def plan(memory: str) -> Any:
    """Return the plan of the default model, as `chairlift plan --json` prints it."""
    command = [sys.executable, "-m", "chairlift", "plan", "--memory", memory, "--max-num-seqs", "256", "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Print the number of requests under paging and under full reservations."""
    for memory in ("2GiB", "8GiB"):
        result = plan(memory)
        running = {(fit["pool"]["kv"], fit["pool"]["kv_arena"]): fit["num_running"] for fit in result["policies"]}
        print(
            f"{memory}: {result['num_kv_blocks']} blocks; {running['paged', 'buddy']} requests with --kv paged, "
            f"{running['max', 'buddy']} with --kv max"
        )


if __name__ == "__main__":
    main()
