"""Serves three models with memory for two, and checks that every answer is that of a server with this model alone.

    python -m benchmarks.model_switching [--requests 200] [--concurrency 8] [--output-len 16] [--seed 0] [--json]

The models are the default model in three formats. Requests name models at random. After half of them, the file of one
model is removed, and restored after three quarters: meanwhile its requests may end with an error that names the file,
and no others. The memory of all engine processes is sampled every 0.1 s (proportional set size, which counts shared
pages once).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import httpx
import psutil
from benchmarks.common import print_result
from rich.console import RenderableType
from rich.table import Table

from chairlift.loading.fetch import fetch_model
from chairlift.system.memory_amounts import format_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMATS: Final = {"file": {}, "int8": {"quantization": "int8"}, "q8_0": {"quantization": "q8_0"}}
KV_BYTES: Final = 64 << 20
SAMPLE_SECONDS: Final = 0.1
CHANGE: Final = re.compile(r"model '(\w+)' (loaded|unloaded) in ([\d.]+) s \((.*)\); all models")
WORDS: Final = [
    "river",
    "stone",
    "cloud",
    "paper",
    "engine",
    "winter",
    "garden",
    "music",
    "bridge",
    "letter",
    "window",
    "market",
]


@dataclass
class MemorySampler:
    """Samples the memory of the engine processes of a server on a thread."""

    server: psutil.Process
    largest: int = 0
    num_samples: int = 0
    is_done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.is_done.wait(SAMPLE_SECONDS):
            total = 0
            for child in self.server.children():
                with suppress(psutil.Error):
                    if any("engine_process" in part for part in child.cmdline()):
                        total += child.memory_full_info().pss
            self.largest, self.num_samples = max(self.largest, total), self.num_samples + 1


@contextmanager
def serve(models: dict[str, dict[str, Any]], budget: int | None, log: Path) -> Iterator[tuple[str, int]]:
    """Run `chairlift serve` with models on demand, which writes its log to a file; yields its URL and process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "chairlift", "serve", "--models", json.dumps(models), "--port", str(port)]
    command += ["--access-log-format", "none"]
    if budget is not None:
        command += ["--models-memory-bytes", str(budget)]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, "the server has ended"
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def complete(url: str, model: str, prompt: str, max_tokens: int) -> tuple[str | None, str]:
    """The answer, or None, and the error."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
    return (None, reply["error"]["message"]) if "error" in reply else (reply["choices"][0]["text"], "")


def make_prompts(count: int, seed: int) -> list[tuple[str, str]]:
    """Requests as (model, prompt)."""
    draw = random.Random(seed)
    return [(draw.choice(list(FORMATS)), " ".join(draw.choices(WORDS, k=draw.randint(4, 40)))) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chairlift-models-"))
    try:
        result = measure(folder, options)
    finally:
        shutil.rmtree(folder)
    print_result("model_switching", vars(options), result, parts(result), as_json=options.json)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    removed = folder / "q8_0.gguf"
    shutil.copy(fetch_model(), removed)
    models = {
        name: {"model": str(removed if name == "q8_0" else fetch_model()), "kv_cache_memory_bytes": KV_BYTES, **fields}
        for name, fields in FORMATS.items()
    }
    requests = make_prompts(options.requests, options.seed)
    alone: list[str | None] = [None] * len(requests)
    needs = []
    for name in FORMATS:
        alone_log = folder / f"{name}.log"
        with (
            serve({name: models[name]}, None, alone_log) as (url, _pid),
            ThreadPoolExecutor(options.concurrency) as pool,
        ):
            mine = [index for index, (model, _) in enumerate(requests) if model == name]
            texts = pool.map(lambda index: complete(url, *requests[index], options.output_len)[0], mine)
            for index, text in zip(mine, texts, strict=True):
                alone[index] = text
            needs.append(httpx.get(f"{url}/v1/models").json()["data"][0]["status"]["memory_bytes"])
    budget = sum(sorted(needs)[-2:]) + (16 << 20)
    log = folder / "switching.log"
    with serve(models, budget, log) as (url, pid):
        sampler = MemorySampler(psutil.Process(pid))
        thread = threading.Thread(target=sampler.run)
        thread.start()
        answers = run_mixed(url, requests, removed, options)
        sampler.is_done.set()
        thread.join()
    changes = [
        {"model": model, "change": change, "seconds": float(seconds), "reason": reason}
        for model, change, seconds, reason in CHANGE.findall(log.read_text())
    ]
    return summarize(requests, answers, alone, changes, budget, needs, sampler, options)


def run_mixed(
    url: str, requests: list[tuple[str, str]], removed: Path, options: argparse.Namespace
) -> list[tuple[str | None, str]]:
    """Send the requests, and remove and restore the file meanwhile."""
    hidden, count = removed.with_suffix(".hidden"), len(requests)

    def send(index: int) -> tuple[str | None, str]:
        if index == count // 2:
            removed.rename(hidden)
        if index == 3 * count // 4:
            hidden.rename(removed)
        return complete(url, *requests[index], options.output_len)

    with ThreadPoolExecutor(options.concurrency) as pool:
        return list(pool.map(send, range(count)))


def summarize(
    requests: list[tuple[str, str]],
    answers: list[tuple[str | None, str]],
    alone: list[str | None],
    changes: list[dict[str, Any]],
    budget: int,
    needs: list[int],
    sampler: MemorySampler,
    options: argparse.Namespace,
) -> dict[str, Any]:
    failed = [(model, error) for (model, _), (text, error) in zip(requests, answers, strict=True) if text is None]
    loads = [change["seconds"] for change in changes if change["change"] == "loaded"]
    unloads = [change["seconds"] for change in changes if change["change"] == "unloaded"]
    return {
        "requests": len(requests),
        "equal": sum(text is not None and text == own for (text, _), own in zip(answers, alone, strict=True)),
        "different": sum(text is not None and text != own for (text, _), own in zip(answers, alone, strict=True)),
        "failed_by_model": {name: sum(model == name for model, _ in failed) for name in FORMATS},
        "errors": sorted({error for _, error in failed}),
        "budget_bytes": budget,
        "planned_bytes": needs,
        "largest_bytes": sampler.largest,
        "num_samples": sampler.num_samples,
        "load_seconds": {"median": median(loads), "least": min(loads), "most": max(loads)},
        "unload_seconds": {"median": median(unloads), "least": min(unloads), "most": max(unloads)} if unloads else None,
        "changes": changes,
    }


def parts(result: dict[str, Any]) -> list[RenderableType]:
    """The lines and the table of the result."""
    table = Table("change", "median s", "least", "most", title="time to switch")
    for name in ("load", "unload"):
        if (times := result[f"{name}_seconds"]) is not None:
            table.add_row(name, *(f"{times[key]:.2f}" for key in ("median", "least", "most")))
    return [
        f"{result['requests']} requests: {result['equal']} answers equal to those of the model alone, "
        f"{result['different']} different; failed while a file was missing: {result['failed_by_model']}",
        *(f"  {error}" for error in result["errors"]),
        f"memory of the engines: at most {format_memory(result['largest_bytes'])} in {result['num_samples']} samples; "
        f"budget {format_memory(result['budget_bytes'])}",
        table,
        *(
            f"{change['model']:>5} {change['change']:<9} {change['seconds']:5.1f} s  {change['reason']:.90}"
            for change in result["changes"]
        ),
    ]


if __name__ == "__main__":
    main()
