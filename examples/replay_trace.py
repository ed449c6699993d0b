"""Record the load of a session, and replay it on an engine with other limits.

The trace has lengths and times, but no text. The simulator replays it with step times that are fitted to the event log
of the session.

    python examples/replay_trace.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams

PROMPTS = [f"Number {number} in words is" for number in range(8)]


def record(trace: Path, events: Path) -> None:
    """Answer some prompts while a trace and an event log are written."""
    llm = LLM(num_kv_blocks=400, max_num_seqs=4, record_trace=trace, event_log=events)
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=12 + 2 * i) for i in range(len(PROMPTS))]
    llm.generate(PROMPTS, params)
    llm.close()


def replay(trace: Path, events: Path, max_num_seqs: int) -> Any:
    """Return the metrics of the replayed trace, as `chairlift simulate --json` prints them."""
    command = [sys.executable, "-m", "chairlift", "simulate", "--trace", str(trace), "--fitted-to", str(events)]
    command += ["--max-num-seqs", str(max_num_seqs), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    """Print the TTFT of the same load with one, two and four seats."""
    with tempfile.TemporaryDirectory() as folder:
        trace, events = Path(folder) / "trace.jsonl", Path(folder) / "events.jsonl"
        record(trace, events)
        for seats in (1, 2, 4):
            metrics = replay(trace, events, seats)["results"]
            print(f"{seats} seats: {metrics['num_answered']} requests, TTFT p99 {metrics['ttft']['p99']:.3f} s")


if __name__ == "__main__":
    main()
