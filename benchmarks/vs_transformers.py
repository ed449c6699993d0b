"""Compares Chairlift with `generate` of transformers in static batches: useful output tokens/s on the same requests.

    python benchmarks/vs_transformers.py [--repeats 3] [--num-prompts 64] [--baseline-share 0.25] [--state FOLDER]

Prompt lengths are log-normal (median 96, 16..512), and forced output lengths exponential (mean 96, 8..384). All
requests arrive at the start; decoding is greedy in float32. The baseline runs them in order in batches of 16, padded on
the left, and decodes each batch to its longest output. Only requested tokens count as useful.

The engines alternate (A B A B ...), and the result is the median of the ratios of neighbouring runs, because the speed
of a shared machine changes. Each run has its own process, so that the engines share no memory, threads or caches, and
each run reports its own peak memory. Loading and a warm-up are not timed. With --state, finished runs are kept in a
folder and not repeated. --baseline-share S measures every (1/S)-th batch of the baseline, other batches in each repeat,
and extrapolates their speed to all batches; the report states this.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import build_engine
from chairlift.lab.bench.driver import drive_all_at_once
from chairlift.lab.bench.machine import machine_facts, peak_rss_bytes
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload
from chairlift.loading.cache import write_atomically
from chairlift.loading.resolve import load_config, resolve_model
from chairlift.system.memory_amounts import parse_memory

ENGINES = ("chairlift", "transformers")
NUM_WARM_UP = 2
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that affect a run. Runs with different settings are never compared."""

    model: str | None
    num_prompts: int
    seed: int
    input_len: str
    output_len: str
    baseline_batch_size: int
    baseline_share: float
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: str
    num_threads: int | None

    def workload(self, token_round: int = 0) -> list[WorkloadRequest]:
        return make_workload(
            self.seed,
            self.num_prompts,
            parse_lengths(self.input_len),
            parse_lengths(self.output_len),
            ArrivalProcess(),
            load_config(resolve_model(self.model)).vocab_size,
            token_round=token_round,
        )

    def warm_up(self) -> list[WorkloadRequest]:
        return [
            WorkloadRequest(r.request_id, r.arrival, r.prompt_token_ids, WARM_UP_TOKENS)
            for r in self.workload(token_round=1)[:NUM_WARM_UP]
        ]


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One run of one engine.

    Attributes:
        seconds: the measured time.
        useful_tokens: number of requested output tokens in that time.
        tokens: output tokens by request id.
    """

    seconds: float
    useful_tokens: int
    peak_rss_bytes: int | None
    tokens: dict[str, list[int]]

    @property
    def speed(self) -> float:
        return self.useful_tokens / self.seconds


def run_chairlift(settings: Settings) -> EngineRun:
    config = EngineConfig(
        model=settings.model,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_cache_memory_bytes=parse_memory(settings.kv_cache_memory_bytes),
        num_threads=settings.num_threads,
        skip_tokenizer_init=True,
    )
    engine = build_engine(config)
    drive_all_at_once(engine, settings.warm_up())
    workload = settings.workload()
    start = time.perf_counter()
    tokens = drive_all_at_once(engine, workload)
    return EngineRun(time.perf_counter() - start, sum(r.output_len for r in workload), peak_rss_bytes(), tokens)


def run_transformers(settings: Settings, repeat: int) -> EngineRun:
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    model = load_baseline(settings.model)
    generate_batch(model, settings.warm_up())
    workload = settings.workload()
    size = settings.baseline_batch_size
    batches = [workload[start : start + size] for start in range(0, len(workload), size)]
    timed = timed_batches(batches, settings.baseline_share, repeat)
    tokens: dict[str, list[int]] = {}
    start_time = time.perf_counter()
    for batch in timed:
        tokens |= generate_batch(model, batch)
    seconds = time.perf_counter() - start_time
    return EngineRun(seconds, sum(r.output_len for batch in timed for r in batch), peak_rss_bytes(), tokens)


def timed_batches(batches: Sequence[list[WorkloadRequest]], share: float, repeat: int) -> list[list[WorkloadRequest]]:
    """The measured batches: every k-th batch, where k is 1 / share, beginning at another one in each repeat."""
    every = min(round(1 / share), len(batches))
    return list(batches[repeat % every :: every])


def load_baseline(model: str | None) -> Any:
    """Load the same file in float32. Decoding continues after the end-of-sequence token."""
    transformers: Any = import_module("transformers")
    files = resolve_model(model)
    folder, gguf = (files.path.parent, files.path.name) if files.kind == "gguf" else (files.path, None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    loaded.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return loaded.eval()


@torch.inference_mode()
def generate_batch(model: Any, batch: Sequence[WorkloadRequest]) -> dict[str, list[int]]:
    """Run one static batch to its longest output; returns the requested tokens by request id."""
    width = max(len(request.prompt_token_ids) for request in batch)
    longest = max(request.output_len for request in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, width - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
        mask[row, width - len(request.prompt_token_ids) :] = 1
    out = model.generate(ids, attention_mask=mask, max_new_tokens=longest)
    assert out.shape == (len(batch), width + longest), "the baseline decodes to its longest output"
    return {r.request_id: out[row, width : width + r.output_len].tolist() for row, r in enumerate(batch)}


def run_stage(engine: str, repeat: int, settings: Settings) -> EngineRun:
    return run_chairlift(settings) if engine == "chairlift" else run_transformers(settings, repeat)


def load_or_make_run(engine: str, repeat: int, settings: Settings, folder: Path) -> EngineRun:
    """Read the run from the folder, or make it in a separate process."""
    path = folder / f"{engine}-{repeat}.json"
    if not path.exists():
        command = [sys.executable, __file__, "--stage", engine, "--repeat", str(repeat), "--out", str(path)]
        quiet = {**os.environ, "TQDM_DISABLE": "1"}
        subprocess.run([*command, "--settings", json.dumps(asdict(settings))], check=True, env=quiet)
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["settings"] != asdict(settings):
        raise SystemExit(f"{path} holds a run with other settings ({record['settings']}): give another --state folder")
    run = EngineRun(**record["run"])
    print(f"repeat {repeat + 1}, {engine}: {run.speed:.1f} useful tokens/s in {run.seconds:.1f} s", file=sys.stderr)
    return run


def count_identical(pairs: Sequence[tuple[EngineRun, EngineRun]]) -> tuple[int, int]:
    """The number of requests with the same greedy tokens in both engines, and the number of compared requests."""
    same = [ours.tokens[rid] == tokens for ours, theirs in pairs for rid, tokens in theirs.tokens.items()]
    return sum(same), len(same)


def report(settings: Settings, pairs: Sequence[tuple[EngineRun, EngineRun]]) -> None:
    """Print the table and the JSON line."""
    ratios = [ours.speed / theirs.speed for ours, theirs in pairs]
    same, compared = count_identical(pairs)
    extrapolated = settings.baseline_share < 1
    label = f"transformers ({settings.baseline_share:g} of the batches)" if extrapolated else "transformers"
    table = Table(title="useful output tokens a second", title_justify="left")
    for column in ("", *(f"run {i + 1}" for i in range(len(pairs))), "median"):
        table.add_column(column, justify="right" if column else "left")
    rows = {
        "Chairlift": [ours.speed for ours, _ in pairs],
        label: [theirs.speed for _, theirs in pairs],
        "ratio": ratios,
    }
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in [*values, median(values)]))
    Console().print(table)
    if extrapolated:
        print(f"the baseline is extrapolated from {settings.baseline_share:g} of its batches")
    print(f"the same greedy tokens in {same} of {compared} requests (sums in another order may break near ties)")
    record = {
        "benchmark": "vs_transformers",
        "machine": machine_facts().to_dict(),
        "settings": asdict(settings),
        "baseline_is_extrapolated": extrapolated,
        "ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
        "speed": {engine: [pair[i].speed for pair in pairs] for i, engine in enumerate(ENGINES)},
        "peak_rss_bytes": {engine: [pair[i].peak_rss_bytes for pair in pairs] for i, engine in enumerate(ENGINES)},
        "identical_requests": same,
        "compared_requests": compared,
    }
    print(json.dumps(record))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=".gguf file or folder; default: the default model")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--input-len", default="lognormal:96,0.7,16..512")
    parser.add_argument("--output-len", default="exp:96,8..384")
    parser.add_argument("--baseline-batch-size", type=int, default=16)
    parser.add_argument("--baseline-share", type=float, default=1.0)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--kv-cache-memory-bytes", default="1GiB", help="KV memory of Chairlift")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--state", type=Path, help="keep finished runs in this folder, and do not repeat them")
    for internal in ("--stage", "--repeat", "--out", "--settings"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not 0 < arguments.baseline_share <= 1:
        parser.error(f"--baseline-share must be in (0, 1], got {arguments.baseline_share}")
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.stage is not None:
        settings = Settings(**json.loads(arguments.settings))
        run = run_stage(arguments.stage, int(arguments.repeat), settings)
        record = {"settings": asdict(settings), "run": asdict(run)}
        write_atomically(Path(arguments.out), json.dumps(record))
        return
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.state or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        pairs = []
        for repeat in range(arguments.repeats):
            ours, theirs = (load_or_make_run(engine, repeat, settings, folder) for engine in ENGINES)
            pairs.append((ours, theirs))
    report(settings, pairs)


if __name__ == "__main__":
    main()
