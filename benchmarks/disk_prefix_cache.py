"""Measures the time to the first token of a long chat after a restart: without the prefix cache on disk, and with it.

    python -m benchmarks.disk_prefix_cache [MODEL] [--tokens 4000] [--repeats 3] [--seed 0] [--num-threads N] [--json]

Each measurement starts a new engine, whose memory is empty. "files in memory" reads files that the system still has in
memory, and "from the device" reads them after the system has dropped them. The prompts are random token ids, and
the answers of all engines must be the same.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import print_result, spread
from rich.table import Table

from chairlift import LLM, SamplingParams
from chairlift.system.memory_amounts import format_memory

OUTPUT_TOKENS = 8


def run(options: argparse.Namespace, prompt: list[int], folder: Path | None) -> tuple[float, int, list[int]]:
    """The time to the first token in a new engine, the number of cached tokens, and the answer."""
    llm = LLM(
        model=options.model, num_threads=options.num_threads, prefix_cache_dir=folder, kv_cache_memory_bytes=1 << 30
    )
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    llm.close()
    assert output.times is not None
    assert output.times.first_token is not None
    seconds = output.times.first_token - output.times.arrival
    return seconds, output.num_cached_tokens, list(output.outputs[0].token_ids)


def drop_from_memory(folder: Path) -> int:
    """Let the system drop the files from its memory; returns their size in bytes."""
    total = 0
    for path in folder.glob("*/*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        total += path.stat().st_size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    prompt = random.Random(options.seed).choices(range(1000, 30000), k=options.tokens)
    seconds: dict[str, list[float]] = {"without": [], "files in memory": [], "from the device": []}
    cached = dict.fromkeys(seconds, 0)
    with tempfile.TemporaryDirectory(prefix="chairlift-prefixes-") as name:
        folder = Path(name)
        _first, _none, expected = run(options, prompt, folder)
        for _ in range(options.repeats):
            for kind, times in seconds.items():
                if kind == "from the device":
                    num_bytes = drop_from_memory(folder)
                taken, cached[kind], answer = run(options, prompt, None if kind == "without" else folder)
                assert answer == expected, "the answers differ"
                times.append(taken)
    report(seconds, cached, num_bytes, options)


def report(
    seconds: dict[str, list[float]], cached: dict[str, int], num_bytes: int, options: argparse.Namespace
) -> None:
    table = Table("prefix cache on disk", "TTFT, ms", "cached tokens", "times faster")
    records: list[dict[str, Any]] = []
    base = median(seconds["without"])
    for kind, times in seconds.items():
        milliseconds = spread([1000 * seconds for seconds in times])
        table.add_row(kind, milliseconds, str(cached[kind]), f"{base / median(times):.1f}")
        records.append({"kind": kind, "seconds": times, "cached_tokens": cached[kind]})
    line = f"{format_memory(num_bytes)} on disk; all answers are the same"
    print_result("disk_prefix_cache", vars(options), records, [line, table], as_json=options.json)


if __name__ == "__main__":
    main()
