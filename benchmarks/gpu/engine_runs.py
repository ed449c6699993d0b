"""The sections `engine`, `batching` and `memory`: engines of kernel sets, of batching policies, and their memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gpu.session import Session
from benchmarks.peers.figures import FIGURES, run_figures
from benchmarks.peers.stage import ROOT, EngineSetting, StageRunner
from benchmarks.peers.workload import PeerWorkload
from rich.console import RenderableType
from rich.table import Table

from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_decoder
from chairlift.engine.startup.memory_plan import plan_memory
from chairlift.kernels.kernel_memory import total
from chairlift.lab.bench.driver import drive_all_at_once
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.loading.resolve import resolve_model
from support.parameter_memory import parameter_bytes

WORKLOAD: Final = PeerWorkload(
    ("prompt", "burst", "single"), input_len="fixed:512", output_len="exp:128,8..512", single_output_len=256
)
SMALL_WORKLOAD: Final = replace(
    WORKLOAD,
    prompt_len=12,
    num_prompts=3,
    input_len="uniform:4..9",
    output_len="uniform:2..4",
    single_input_len=4,
    single_output_len=3,
    repeats=1,
)
PYTHON: Final = Path(sys.executable)
POLICIES: Final = ("static-global", "static", "continuous")
PUBLISHED_FACTOR: Final = 23.4
"""Continuous batching over static batches that run to the longest output of all: Daniel et al., Anyscale, 2023."""

BATCHING: Final = ("--num-prompts", "64", "--input-len", "fixed:512", "--output-len", "exp:128,1..512",
                   "--static-batch-size", "8")  # fmt: skip
SMALL_BATCHING: Final = ("--num-prompts", "4", "--input-len", "fixed:5", "--output-len", "uniform:1..4",
                         "--static-batch-size", "2", "--num-warmups", "1")  # fmt: skip


def measure_engines(session: Session) -> tuple[dict[str, Any], list[RenderableType]]:
    """Prompts, a burst and single streams, each engine in a process of its own, one after the other."""
    workload = SMALL_WORKLOAD if session.is_small else WORKLOAD
    vocab_size = resolve_model(session.model).config().vocab_size
    flags = {name: session.engine_flags(name) for name in session.kernels}
    if "triton" in flags and not session.is_small:
        flags["triton without CUDA graphs"] = [*flags["triton"], "--enforce-eager"]
    settings = [
        EngineSetting(f"Chairlift, {name}", "chairlift_run", PYTHON, {"flags": each}) for name, each in flags.items()
    ]
    if find_spec("vllm") is not None and not session.is_small:
        settings.append(_vllm(session))
    figures = {}
    for setting in settings:
        run = StageRunner().run(setting, workload.job(setting.options, vocab_size, 0), "")
        figures[setting.label] = run_figures(run, workload.prompt_len)
    table = Table("", *figures, title="engines on the same requests")
    for figure in FIGURES:
        if any(figure.key in values for values in figures.values()):
            table.add_row(figure.heading, *(figure.cell(values.get(figure.key)) for values in figures.values()))
    if len(figures) == len(flags):
        table.caption = "without vLLM" if session.is_small else "without vLLM, which is not installed"
    return {"workload": workload.to_dict(), "engines": figures}, [table]


def _vllm(session: Session) -> EngineSetting:
    """vLLM with the same limits."""
    config = session.engine_config("torch")
    options = {
        "model": session.model,
        "dtype": "bfloat16",
        "seats": config.max_num_seqs,
        "token_budget": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "load_format": "dummy" if session.is_random else "auto",
    }
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    return EngineSetting("vLLM", "vllm_run", PYTHON, options, variables)


def compare_batching(session: Session) -> tuple[dict[str, Any], list[RenderableType]]:
    """Static and continuous batching with `chairlift bench compare`, on the first kernel set."""
    kernels = session.kernels[0]
    flags = session.engine_flags(kernels)
    workload = SMALL_BATCHING if session.is_small else BATCHING
    command = [sys.executable, "-m", "chairlift", "bench", "compare", *flags, *workload, "--repeats", "1"]
    command += ["--policies", ",".join(POLICIES), "--json"]
    if session.pictures is not None:
        command += ["--save-events", str(session.pictures.absolute())]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    systems = json.loads(ended.stdout.splitlines()[-1])["systems"]
    speeds = {name: systems[name]["results"]["output_tokens_per_s"]["median"] for name in POLICIES}
    factors = {name: speeds[name] / speeds[POLICIES[0]] for name in POLICIES}
    table = Table("batching", "output tokens/s", "factor", "published", title=f"batching on {kernels} kernels")
    for name in POLICIES:
        published = str(PUBLISHED_FACTOR) if name == "continuous" else ""
        table.add_row(name, f"{speeds[name]:,.4g}", f"{factors[name]:.2f}", published)
    if session.pictures is not None:
        from benchmarks.run_pictures import main as draw_runs

        logs = [f"{name}={session.pictures / name}.jsonl" for name in POLICIES]
        draw_runs([*logs, "--output", str(session.pictures)])
    table.caption = "published: OPT-13B on an A100-40GB, static batches of 4, outputs up to 1,536 tokens"
    return {"output_tokens_per_s": speeds, "factors": factors, "published": PUBLISHED_FACTOR}, [table]


def compare_memory(session: Session) -> tuple[dict[str, Any], list[RenderableType]]:
    """The planned weights, K and V and activations beside what an engine of the first kernel set allocates."""
    config = replace(session.engine_config(session.kernels[0]), enable_prefix_caching=False, skip_tokenizer_init=True)
    device = session.device
    before = _allocated(device)
    loaded = load_decoder(config)
    weights = _allocated(device) - before or parameter_bytes(loaded.model)
    engine = build_engine(config, loaded=loaded)
    held = _allocated(device)
    pool = loaded.kv_cache_plan
    assert pool is not None, "the engine has provided it"
    kv_bytes = held - before - weights if held else _cache_bytes(loaded.model.attention_layers.values())
    exact = replace(config, num_kv_blocks=pool.num_blocks)
    plan = plan_memory(exact, loaded.config, loaded.formats, None)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    _run_largest_steps(engine, plan.max_model_len, loaded.config.vocab_size)
    peak = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else None
    engine.close()
    rows = {
        "weights": (total(plan.weights), weights),
        "K and V": (plan.pool.kv_bytes, kv_bytes),
        "activations of a step, maximum": (total(plan.activations), peak),
    }
    table = Table("memory", "planned, bytes", "allocated, bytes", title=f"memory with {session.kernels[0]} kernels")
    for name, (planned, allocated) in rows.items():
        table.add_row(name, f"{planned:,}", "not measured on the CPU" if allocated is None else f"{allocated:,}")
    problems = [
        f"{name} take {allocated:,} bytes, more than the planned {planned:,}"
        for name, (planned, allocated) in rows.items()
        if allocated is not None and allocated > planned * 1.01
    ]
    found = {name: {"planned": planned, "allocated": allocated} for name, (planned, allocated) in rows.items()}
    return {"memory": found, "problems": problems}, [table]


def _allocated(device: torch.device) -> int:
    """Bytes of tensors on a GPU; 0 on the CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _cache_bytes(layers: Any) -> int:
    """Bytes of K and V of all layers, each memory once."""
    return sum(
        {kept.data_ptr(): kept.nbytes for layer in layers for kept in layer.kv_cache if kept is not None}.values()
    )


def _run_largest_steps(engine: Any, max_model_len: int, vocab_size: int) -> None:
    """Serve as many requests as the engine has seats, one of them as long as it may be."""
    seats = engine.facts.started.max_num_seqs
    lengths = [max_model_len - 2, *[8] * (seats - 1)]
    workload = [
        WorkloadRequest(str(index), 0.0, [(index + place) % vocab_size for place in range(length)], 2)
        for index, length in enumerate(lengths)
    ]
    drive_all_at_once(engine, workload)
