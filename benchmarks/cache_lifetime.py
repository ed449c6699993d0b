"""The hits, the prefill and the memory of a prefix cache that keeps each prefix for a fixed time, over agent sessions.

    python -m benchmarks.cache_lifetime [--sessions 400] [--seed 0]

A prefix is dropped when it has not been used for its time to live (TTL), and memory has no limit. Turns do not wait for
each other: a turn takes the time of its uncached tokens and of its output at constant speeds. System prompts, which all
sessions share, are always cached. The published values are those of traces of coding agents (vLLM, "AgentX", 2026).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Final

from benchmarks.common import print_result
from rich.table import Table

from chairlift.lab.workload.agent_sessions import MEDIAN_TURNS, SYSTEM_LEN, AgentSessions
from chairlift.lab.workload.request import WorkloadRequest

SCALE: Final = 1 / 100
"""The factor of the lengths, which are multiplied again: a hundredth of the tokens is drawn."""

TTLS: Final = {"1 minute": 60.0, "5 minutes": 300.0, "1 hour": 3600.0, "to the last use": math.inf}
PUBLISHED: Final = {
    "1 minute": {"hit rate": 0.854, "prefill": 18.9, "memory": 1.0},
    "1 hour": {"hit rate": 0.986, "memory": 5.0},
}
"""Prefill by that without a limit, and memory by that of one minute."""

Values = dict[str, float]


def measure(workload: Sequence[WorkloadRequest], ttl: float, args: argparse.Namespace) -> Values:
    """The hit rate, the uncached prompt tokens, and the mean number of tokens held for each session that runs.

    A prefix is held from its computation until it is used again or its time is over; without a limit, to its last use.
    """
    ends, lens = dict[str | None, float](), dict[str | None, int]()
    last_turns = {item.request_id for item in workload} - {item.continues for item in workload}
    system_len = round(SCALE * SYSTEM_LEN)
    num_prompt = num_uncached = 0
    held = busy = 0.0
    for item in workload:
        start = ends.get(item.follows, 0.0) + item.arrival
        known, idle = lens.get(item.continues, 0), start - ends.get(item.continues, -math.inf)
        prompt_len = known + len(item.prompt_token_ids)
        uncached = prompt_len - max(system_len, known if idle <= ttl else 0)
        seconds = (uncached * args.prefill + item.output_len * args.decode) / SCALE
        num_prompt, num_uncached = num_prompt + prompt_len, num_uncached + uncached
        ends[item.request_id], lens[item.request_id] = start + seconds, prompt_len + item.output_len
        held += seconds * prompt_len
        held += min(idle, ttl) * known if item.continues is not None else 0.0
        if item.request_id in last_turns and ttl < math.inf:
            held += ttl * lens[item.request_id]
        busy += seconds + (idle if item.continues is not None else 0.0)
    tokens = num_uncached / SCALE, held / busy / SCALE
    return {"hit rate": 1 - num_uncached / num_prompt, "prefill tokens": tokens[0], "tokens held": tokens[1]}


def make_table(results: dict[str, Values]) -> Table:
    """The values of each TTL, and their ratios next to the published ones."""
    table = Table("TTL", "hit rate, published", "ours", "prefill, published", "ours", "memory, published", "ours")
    least, first = results["to the last use"]["prefill tokens"], results["1 minute"]["tokens held"]
    for name, values in results.items():
        published = PUBLISHED.get(name, {})
        prefill, memory = values["prefill tokens"], values["tokens held"]
        ours = f"{values['hit rate']:.3f}", f"{prefill / least:.2f}x = {prefill / 1e6:,.0f} M", f"{memory / first:.2f}x"
        shown = [f"{published[key]:g}" if key in published else "-" for key in ("hit rate", "prefill", "memory")]
        memory_text = f"{ours[2]} = {memory / 1e3:,.0f} k"
        table.add_row(name, shown[0], ours[0], shown[1], ours[1], shown[2], memory_text)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--turns", type=int, default=MEDIAN_TURNS, help="turns of the median session")
    parser.add_argument("--prefill", type=float, default=1e-4, help="seconds of an uncached prompt token")
    parser.add_argument("--decode", type=float, default=1e-2, help="seconds of an output token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the table")
    args = parser.parse_args()
    load = AgentSessions(args.sessions, args.sessions, SCALE, args.turns, max_model_len=round(400_000 * SCALE))
    workload = load.requests(args.seed, 1000)
    results = {name: measure(workload, ttl, args) for name, ttl in TTLS.items()}
    print_result("cache_lifetime", vars(args), results, [make_table(results)], as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
