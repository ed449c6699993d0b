"""Soak test: mixed calls to `chairlift serve` with three models for some minutes. Nothing may be left of them.

    python -m tools.soak [--minutes 30] [--seed N]

Completions of a tiny model in a pool that is far too small are checked to the last token, and beside them the calls of
`soak_calls.py` use all endpoints and models. After each round every request must have ended, every block be free, and
no descriptor be open. The memory of each process must be flat in the last two thirds of the run. It prints tables and,
as the last line, JSON. It ends with status 1 at the first failure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from chairlift.loading.fetch import DEFAULT_MODEL
from support.plain_http import NO_TLS
from support.pooling_models import write_pooling_model
from support.served import Served, serve
from support.tiny_engine import CONFIG, tiny_options
from support.waiting import AMPLE_SECONDS
from tools.process_memory import WINDOW_SECONDS, MemoryLog, MemoryTrend
from tools.soak_calls import ADAPTER, CHAT, ENCODER, TINY, SoakCalls, write_adapter
from tools.soak_load import SERVER_OPTIONS, Tally, check_pool, make_requests, run_load, wait_until_idle

ROUND_COMPLETIONS = 500
ROUND_CALLS = 120
NUM_LOADS = 4
"""The completions of a round are those of this many rounds before, and get the same answers."""

MAX_SLOPE_BYTES = 3 << 20
"""Maximum slope of the private memory of a process in ten minutes: about 100 bytes for each of its requests."""

MAX_HELPERS = 4
"""Two processes for each model that generates text, which compile grammars. Each starts on first use."""

PIPES_PER_HELPER = 2
"""The descriptors of the server for each helper."""


@dataclass(slots=True)
class SoakResult:
    """What a soak has done and measured.

    Attributes:
        descriptors: the open descriptors after each round, without those of helpers.
    """

    tally: Tally = field(default_factory=Tally)
    descriptors: list[int] = field(default_factory=list)
    trends: list[MemoryTrend] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    preemptions: float = 0.0


def soak_options(folder: Path, chat_model: str) -> dict[str, Any]:
    """Write the other models and the adapter into a folder, and return the options of the server."""
    adapter = write_adapter(folder / "adapter", CONFIG["hidden_size"], CONFIG["num_hidden_layers"])
    encoder = folder / "encoder"
    encoder.mkdir()
    tiny = tiny_options(folder / "tiny", **SERVER_OPTIONS, lora_modules={ADAPTER: str(adapter)}, max_loras=2)
    del tiny["served_model_name"]
    models = {
        TINY: tiny,
        CHAT: {"model": chat_model, "num_kv_blocks": 200, "max_model_len": 1024, "num_threads": 1},
        ENCODER: {"model": str(write_pooling_model(encoder, "bert")), "num_threads": 1},
    }
    named = {name: {key.replace("_", "-"): value for key, value in model.items()} for name, model in models.items()}
    return {"models": json.dumps(named), "keep_alive": -1, "page_control": True}


@contextlib.contextmanager
def serve_models(folder: Path, chat_model: str = DEFAULT_MODEL) -> Iterator[Served]:
    """Run a server with all models loaded, from files that are written into a folder."""
    with serve(soak_options(folder, chat_model)) as served:
        for model in (TINY, CHAT, ENCODER):
            loaded = httpx.post(f"{served.url}/models/load", json={"model": model}, timeout=300, verify=NO_TLS)
            assert loaded.status_code == 200, loaded.text
        yield served


async def soak(
    served: Served, calls: SoakCalls, seed: int, has_time: Callable[[], bool], size: float = 1.0
) -> SoakResult:
    """Run rounds of load while `has_time`, and check after each that nothing is left.

    Args:
        size: the size of a round, as a multiple of ROUND_COMPLETIONS and ROUND_CALLS.
    """
    result = SoakResult()
    num_completions = round(size * ROUND_COMPLETIONS)
    while has_time():
        requests = make_requests(num_completions, seed + len(result.descriptors) % NUM_LOADS)
        async with asyncio.TaskGroup() as group:
            group.create_task(run_load(served.url, requests, result.tally))
            group.create_task(calls.run(round(size * ROUND_CALLS)))
        await wait_until_idle(served)
        for model in (TINY, CHAT):
            check_pool(served, model)
        await asyncio.sleep(0.3)  # Abandoned connections close.
        result.descriptors.append(await _settled_descriptors(served, result.descriptors))
        assert result.tally.num_requests == num_completions * len(result.descriptors), "one answer for each request"
        print(f"round {len(result.descriptors)}: {result.tally.num_requests} completions", file=sys.stderr)
    result.preemptions = served.metric("vllm:num_preemptions_total")
    result.calls = dict(calls.counts)
    return result


async def _settled_descriptors(served: Served, earlier: list[int]) -> int:
    """The open descriptors once they are as few as after the first round. A busy machine closes connections late."""
    end = time.monotonic() + AMPLE_SECONDS
    while (count := _num_descriptors(served)) > min(earlier[:1], default=count) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    return count


def _num_descriptors(served: Served) -> int:
    front, *children = served.processes()
    engines = [each for each in children if "engine_process" in " ".join(each.cmdline())]
    num_helpers = len(children) - len(engines)
    assert num_helpers <= MAX_HELPERS
    num_descriptors: int = sum(each.num_fds() for each in (front, *engines))
    return num_descriptors - PIPES_PER_HELPER * num_helpers


def check_descriptors(result: SoakResult) -> None:
    """Check that no round has left a descriptor open."""
    assert max(result.descriptors[1:], default=0) <= result.descriptors[0], f"descriptors: {result.descriptors}"


def check_trends(trends: list[MemoryTrend]) -> None:
    """Check that the memory of no process grows."""
    growing = {trend.role: round(trend.slope) for trend in trends if trend.slope > MAX_SLOPE_BYTES}
    assert not growing, f"bytes of private memory in {WINDOW_SECONDS:g} s: {growing}; limit: {MAX_SLOPE_BYTES}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, serve_models(folder := Path(name)) as served:
        started = time.monotonic()
        end = started + 60 * options.minutes
        calls = SoakCalls(served.url, folder / "adapter", options.seed)
        log = MemoryLog(served.process.pid)
        with log.recording():
            result = asyncio.run(soak(served, calls, options.seed, lambda: time.monotonic() < end))
        result.trends = log.trends(since=started + 20 * options.minutes)
    _print(result, options.seed, time.monotonic() - started)
    assert result.preemptions > 0, "the pool was too large"
    check_descriptors(result)
    check_trends(result.trends)


def _print(result: SoakResult, seed: int, seconds: float) -> None:
    console = Console(width=120)
    title = f"Memory in MiB in the last two thirds of {seconds / 60:.0f} minutes; slopes in KiB per minute"
    table = Table("process", "number", "PSS", "private, first", "largest", "last", "slope", title=title)
    for trend in result.trends:
        sizes = (trend.last.pss, trend.first.private, trend.largest.private, trend.last.private)
        row = [f"{size / 2**20:.1f}" for size in sizes]
        table.add_row(trend.role, str(trend.num_processes), *row, f"{trend.slope / 2**10 * 60 / WINDOW_SECONDS:+.1f}")
    console.print(table)
    tally = result.tally
    console.print(f"{_counts(tally.outcomes)}; of them {_counts(tally.kinds)}; {tally.output_tokens} tokens answered")
    console.print(f"other calls: {_counts(result.calls)}")
    console.print(f"after each of {len(result.descriptors)} rounds: no request, all blocks and slots free")
    figures: dict[str, Any] = {
        "requests": tally.num_requests,
        **tally.outcomes,
        "kinds": dict(tally.kinds),
        "calls": result.calls,
        "output_tokens": tally.output_tokens,
        "preemptions": result.preemptions,
        "rounds": len(result.descriptors),
        "descriptors": [result.descriptors[0], result.descriptors[-1]],
        "slopes": {trend.role: round(trend.slope) for trend in result.trends},
        "seed": seed,
        "seconds": round(seconds, 1),
    }
    print(json.dumps({"soak": figures}))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


if __name__ == "__main__":
    main()
