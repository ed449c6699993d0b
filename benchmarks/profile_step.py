"""Measures the time of each part of a decode step, by kernel set and batch size.

    python -m benchmarks.profile_step [--model PATH] [--kernels torch,native] [--batch-sizes 1,16,64]
                                      [--context 128] [--steps 48] [--rounds 3]
                                      [--load-format dummy] [--quantization q4_0] [--json]

Timers wrap the kernels before the model is built, and other functions of the finished engine. Layers are called one by
one, while an engine repeats native layers in one call, which is a tenth faster at batch 1. The time of a section
excludes the sections inside it. Norms and activations belong to the linear layers that follow them (the LM head
includes the final norm), norm and rotation of heads to attention. A timer costs about a microsecond and runs a
few hundred times in a step, nearly always inside the forward pass.

The kernel sets alternate: in each round, each set runs its steps at every batch size, on requests with the same tokens.
Prints medians over steps, and the speed of the other sets relative to the first one.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.common import print_result
from rich.table import Table

from chairlift.config import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineConfig
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.kernels.attention import AttentionBackend, AttentionShape
from chairlift.kernels.interface import Kernels, run_in_order
from chairlift.kernels.kernel_set import get_kernels
from chairlift.kernels.weights import MatrixParts, Weights
from chairlift.lab.bench.driver import forced_requests
from chairlift.lab.bench.machine import machine_facts
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload
from chairlift.models import decoder
from chairlift.worker import model_runner
from chairlift.worker.input_batch import gather_input_batch

LINEAR = {
    "q_proj": "qkv",
    "o_proj": "output",
    "out_proj": "output",
    "gate_proj": "gate_up",
    "fc1": "gate_up",
    "down_proj": "down",
    "fc2": "down",
}
"""Section of a linear layer, by the name of its first matrix; others are in "forward: rest"."""

FORWARD = ("qkv", "attention", "output", "gate_up", "down", "embedding", "forward: rest")
AROUND = ("schedule", "rows", "gather inputs", "attention plan", "sampling", "result", "update", "step: rest")
SECTIONS = (*FORWARD, "LM head", *AROUND)
WARM_UP_STEPS = 4
BUDGET = DEFAULT_MAX_NUM_BATCHED_TOKENS
BLOCK_SIZE = DEFAULT_BLOCK_SIZE

Sections = dict[str, float]
"""Seconds by section, of one step."""


@dataclass(slots=True)
class SectionTimer:
    """Adds up seconds by section. While a section runs, the section around it is paused."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    inner: float = 0.0
    in_whole: bool = False

    def wrap(self, name: str, function: Callable[..., Any], *, whole: bool = False) -> Callable[..., Any]:
        """Wrap a function so that its time is added to the section.

        Args:
            whole: add the time of sections inside it to this section too.
        """

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.in_whole:
                return function(*args, **kwargs)
            around, self.inner, self.in_whole = self.inner, 0.0, whole
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - start
                self.seconds[name] += elapsed - self.inner
                self.inner, self.in_whole = around + elapsed, False

        return timed

    def wrap_method(self, name: str, owner: Any, method: str, *, whole: bool = False) -> None:
        """Replace a method of one object by its timed form."""
        setattr(owner, method, self.wrap(name, getattr(owner, method), whole=whole))

    def take(self) -> Sections:
        """Return the seconds since the last call, and reset them."""
        measured = {section: self.seconds.get(section, 0.0) for section in SECTIONS}
        assert set(self.seconds) <= set(SECTIONS)
        self.seconds.clear()
        return measured


def timed_kernels(kernels: Kernels, timer: SectionTimer) -> Kernels:
    """The kernel set with a timer around every kernel."""

    last_loaded = ""

    def load_matrix(weights: Weights, parts: MatrixParts, in_features: int) -> Any:
        nonlocal last_loaded
        last_loaded = parts[0][0].rpartition(".")[2]
        return kernels.load_matrix(weights, parts, in_features)

    def make_linear(*args: Any) -> Callable[..., Any]:
        """Time the kernel as the section of the matrix that the layer has loaded before."""
        linear = kernels.make_linear(*args)
        return timer.wrap(LINEAR[last_loaded], linear) if last_loaded in LINEAR else linear

    def make_embedding(matrix: Any) -> Callable[..., Any]:
        return timer.wrap("embedding", kernels.make_embedding(matrix))

    def attention(shape: AttentionShape) -> AttentionBackend[Any]:
        backend = kernels.attention(shape)
        timer.wrap_method("attention", backend, "forward")
        return backend

    return replace(
        kernels,
        load_matrix=load_matrix,
        make_embedding=make_embedding,
        make_linear=make_linear,
        attention=attention,
        run_layers=run_in_order,
    )


def timed_engine(config: EngineConfig, timer: SectionTimer) -> Engine:
    """Build an engine with timers around its parts."""

    def get_timed(*args: Any) -> Kernels:
        return timed_kernels(get_kernels(*args), timer)

    with patch.object(decoder, "get_kernels", get_timed):
        engine = build_engine(config)
    wrap_engine(engine, timer)
    return engine


def wrap_engine(engine: Engine, timer: SectionTimer) -> None:
    core = engine.core
    runner: Any = core._executor
    timer.wrap_method("schedule", core.scheduler, "schedule")
    timer.wrap_method("update", core.scheduler, "update")
    timer.wrap_method("rows", runner, "_update_rows")
    timer.wrap_method("rows", runner._rows, "append_sampled")
    timer.wrap_method("attention plan", runner._model, "plan")
    timer.wrap_method("forward: rest", runner._model, "forward")
    timer.wrap_method("LM head", runner._model, "logits", whole=True)
    timer.wrap_method("sampling", runner._sampler, "sample")
    timer.wrap_method("result", runner, "result")
    timer.wrap_method("step: rest", core, "step")


def output_tokens(batch_size: int, context: int, steps: int) -> int:
    """The output length with which the first request still decodes in the last measured step."""
    prefill_tokens_per_step = BUDGET - batch_size + 1
    prefill_steps = batch_size * (context + BLOCK_SIZE) // prefill_tokens_per_step + batch_size
    return prefill_steps + WARM_UP_STEPS + steps + 1


def engine_config(
    model: str | None,
    batch_sizes: list[int],
    context: int,
    steps: int,
    threads: int | None,
    kernels: str = "auto",
    *,
    load_format: str = "auto",
    quantization: str | None = None,
) -> EngineConfig:
    """The configuration of an engine with a pool for all requests. Without a prefix cache, rounds are equal."""
    longest = context + BLOCK_SIZE + output_tokens(max(batch_sizes), context, steps)
    return EngineConfig(
        model=model,
        max_num_seqs=max(batch_sizes),
        max_num_batched_tokens=BUDGET,
        block_size=BLOCK_SIZE,
        num_kv_blocks=max(batch_sizes) * (longest // BLOCK_SIZE + 1),
        disable_hybrid_kv_cache_manager=True,
        num_threads=threads,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kernels=kernels,
        load_format=load_format,
        quantization=quantization if kernels == "native" else None,
    )


def decode_steps(engine: Engine, timer: SectionTimer, batch_size: int, context: int, steps: int) -> list[Sections]:
    """Measure the sections of `steps` steps in which `batch_size` requests decode after about `context` tokens."""
    # All engines of a process share this function, so it is timed only while one of them runs.
    timed_gather = timer.wrap("gather inputs", gather_input_batch)
    with patch.object(model_runner, "gather_input_batch", timed_gather):
        workload = begin_decoding(engine, batch_size, context, steps)
        timer.take()
        measured: list[Sections] = []
        for _ in range(steps):
            assert len(engine.core.step()) == batch_size, "every request decodes in every measured step"
            measured.append(timer.take())
    abort(engine, workload)
    return measured


def begin_decoding(engine: Engine, batch_size: int, context: int, steps: int) -> list[WorkloadRequest]:
    """Add requests, compute their prompts, and return them. They decode for more than `steps` steps.

    Prompt lengths vary over one block, so that as many requests need a new block in one step as in the next.
    """
    workload = make_workload(
        seed=batch_size,
        count=batch_size,
        prompt=parse_lengths(f"uniform:{context}..{context + BLOCK_SIZE - 1}"),
        output=parse_lengths(f"fixed:{output_tokens(batch_size, context, steps)}"),
        arrivals=ArrivalProcess(),
        vocab_size=engine.facts.model_config.vocab_size,
    )
    for request in forced_requests(engine, workload):
        engine.core.add(request.to_request())
    while len(engine.core.step()) < batch_size:
        pass
    for _ in range(WARM_UP_STEPS):
        engine.core.step()
    return workload


def abort(engine: Engine, workload: list[WorkloadRequest]) -> None:
    for item in workload:
        engine.core.abort(item.request_id)
    assert not engine.core.has_work


def milliseconds(measured: list[Sections]) -> dict[str, float]:
    """The medians over steps of each section, of the whole step, and of everything but forward and logits."""
    rows = {section: median(step[section] for step in measured) for section in SECTIONS}
    rows["outside the model"] = median(sum(step[section] for section in AROUND) for step in measured)
    rows["step"] = median(sum(step.values()) for step in measured)
    return {name: 1e3 * seconds for name, seconds in rows.items()}


Profile = dict[int, dict[str, float]]
"""Milliseconds by section, by batch size."""


@dataclass(slots=True)
class ProfiledEngine:
    """An engine with timers, and its measured steps by batch size."""

    engine: Engine
    timer: SectionTimer
    is_native: bool
    measured: defaultdict[int, list[Sections]] = field(default_factory=lambda: defaultdict(list))

    def run_round(self, args: argparse.Namespace, batch_sizes: list[int]) -> None:
        set_threads(self.is_native, args.num_threads)
        for size in batch_sizes:
            self.measured[size] += decode_steps(self.engine, self.timer, size, args.context, args.steps)

    def profile(self) -> Profile:
        return {size: milliseconds(measured) for size, measured in self.measured.items()}


def set_threads(is_native: bool, num_threads: int | None) -> None:
    """Set the number of torch threads as an engine does: one, if native kernels have threads of their own."""
    torch.set_num_threads(1 if is_native else num_threads or machine_facts().num_cores)


def profile_kernel_sets(args: argparse.Namespace) -> tuple[str, dict[str, Profile]]:
    """Measure the kernel sets; returns the name of the model, and the profile of each set."""
    batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    sets: dict[str, ProfiledEngine] = {}
    for name in args.kernels.split(","):
        config = engine_config(
            args.model,
            batch_sizes,
            args.context,
            args.steps,
            args.num_threads,
            name,
            load_format=args.load_format,
            quantization=args.quantization,
        )
        timer = SectionTimer()
        sets[name] = ProfiledEngine(timed_engine(config, timer), timer, name == "native")
    for _ in range(args.rounds):
        for each in sets.values():
            each.run_round(args, batch_sizes)
    return each.engine.facts.model_name, {name: each.profile() for name, each in sets.items()}


def step_table(title: str, profile: Profile) -> Table:
    result = Table(title=f"{title}: time of a step", title_justify="left")
    result.add_column("")
    for batch_size in profile:
        result.add_column(f"batch {batch_size}, ms", justify="right")
        result.add_column("% of step", justify="right")
    for name in next(iter(profile.values())):
        if name == "outside the model":
            result.add_section()
        cells = [cell for p in profile.values() for cell in (f"{p[name]:.3f}", f"{100 * p[name] / p['step']:.1f}")]
        result.add_row(name, *cells)
    return result


def relative_speed_table(profiles: dict[str, Profile]) -> Table:
    """Create a table of the speed of each section relative to the first kernel set."""
    (first, base), *others = profiles.items()
    result = Table(title=f"speed relative to {first}", title_justify="left")
    result.add_column("")
    for name, profile in others:
        for batch_size in profile:
            result.add_column(f"{name}, {batch_size}", justify="right")
    for section in next(iter(base.values())):
        cells = [f"{base[size][section] / p[section]:.2f}" for _, profile in others for size, p in profile.items()]
        result.add_row(section, *cells)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=".gguf file or folder; default: the default model")
    parser.add_argument("--kernels", default="torch,native", help="kernel sets, separated by commas")
    parser.add_argument("--batch-sizes", default="1,16,64")
    parser.add_argument("--context", type=int, default=128, help="approximate number of tokens of context")
    parser.add_argument("--steps", type=int, default=48, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--load-format", default="auto", help="auto or dummy (random weights)")
    parser.add_argument("--quantization", help="format of the weights of native kernels; default: those of the file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    model, profiles = profile_kernel_sets(args)
    tables = [step_table(name, profile) for name, profile in profiles.items()]
    tables += [relative_speed_table(profiles)] if len(profiles) > 1 else []
    print_result("profile_step", {**vars(args), "model": model}, profiles, tables, as_json=args.json)


if __name__ == "__main__":
    main()
