"""Where the time of a decode step goes, by batch size.

    python benchmarks/profile_step.py [--model PATH] [--batch-sizes 1,16,64] [--context 128] [--steps 48]

Callables are wrapped with a timer: the kernels before the model is built, the rest on the objects of
the finished engine; nothing else differs from production. A section's time excludes the sections inside of it (logits
are one section, the linear layer included); norms and activations belong to the linear layers that they stand before,
and norm and rotation of heads to attention. A timer costs about a microsecond and runs a few hundred times a step,
nearly always inside of the model's forward. Prints medians over steps, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from chairlift.bench.driver import forced_requests
from chairlift.bench.machine import machine_facts
from chairlift.config import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineConfig
from chairlift.engine.factory import Engine, build_engine
from chairlift.kernels.backend import AttentionBackend, AttentionShape
from chairlift.kernels.registry import Kernels, get_kernels
from chairlift.models import registry
from chairlift.worker import model_runner
from chairlift.worker.input_batch import gather_input_batch
from chairlift.workload.arrivals import AllAtOnce
from chairlift.workload.lengths import Fixed, Uniform
from chairlift.workload.synthetic import WorkloadRequest, make_workload

FORWARD = ("linear", "attention", "embedding", "forward: rest")
AROUND = ("schedule", "rows", "gather inputs", "attention plan", "sampling", "result", "update", "step: rest")
SECTIONS = (*FORWARD, "logits", *AROUND)
WARM_UP_STEPS = 4
BUDGET = DEFAULT_MAX_NUM_BATCHED_TOKENS
BLOCK_SIZE = DEFAULT_BLOCK_SIZE

Sections = dict[str, float]
"""Seconds by section, of one step."""


@dataclass(slots=True)
class SectionTimer:
    """Adds up seconds by section; a section pauses the one around it."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    inner: float = 0.0
    in_whole: bool = False

    def wrap(self, name: str, function: Callable[..., Any], *, whole: bool = False) -> Callable[..., Any]:
        """The function, timed. `whole`: the sections inside of it count as its own time."""

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
        """Replace a method of one object."""
        setattr(owner, method, self.wrap(name, getattr(owner, method), whole=whole))

    def take(self) -> Sections:
        """What has added up since the last call."""
        taken = {section: self.seconds.get(section, 0.0) for section in SECTIONS}
        assert set(self.seconds) <= set(SECTIONS)
        self.seconds.clear()
        return taken


def timed_kernels(kernels: Kernels, timer: SectionTimer) -> Kernels:
    """The kernel set, every kernel timed."""

    def make_linear(*args: Any) -> Callable[..., Any]:
        return timer.wrap("linear", kernels.make_linear(*args))

    def make_embedding(matrix: Any) -> Callable[..., Any]:
        return timer.wrap("embedding", kernels.make_embedding(matrix))

    def attention(shape: AttentionShape) -> AttentionBackend[Any]:
        backend = kernels.attention(shape)
        timer.wrap_method("attention", backend, "forward")
        return backend

    return replace(kernels, make_embedding=make_embedding, make_linear=make_linear, attention=attention)


@contextmanager
def timed_engine(config: EngineConfig, timer: SectionTimer) -> Iterator[Engine]:
    """An engine whose parts are timed; what all engines of the process share is put back at the end."""

    def get_timed(*args: Any) -> Kernels:
        return timed_kernels(get_kernels(*args), timer)

    with (
        patch.object(registry, "get_kernels", get_timed),
        patch.object(model_runner, "gather_input_batch", timer.wrap("gather inputs", gather_input_batch)),
    ):
        engine = build_engine(config)
        wrap_engine(engine, timer)
        yield engine


def wrap_engine(engine: Engine, timer: SectionTimer) -> None:
    core = engine.core
    runner: Any = core._executor
    timer.wrap_method("schedule", core.scheduler, "schedule")
    timer.wrap_method("update", core.scheduler, "update")
    timer.wrap_method("rows", runner, "_update_rows")
    timer.wrap_method("rows", runner._rows, "append_sampled")
    timer.wrap_method("attention plan", runner, "_plan")
    timer.wrap_method("forward: rest", runner._model, "forward")
    timer.wrap_method("logits", runner._model, "logits", whole=True)
    timer.wrap_method("sampling", runner._sampler, "sample")
    timer.wrap_method("result", runner, "result")
    timer.wrap_method("step: rest", core, "step")


def output_tokens(batch_size: int, context: int, steps: int) -> int:
    """Enough for the first request to go on until the last one has been measured."""
    prefill_tokens_per_step = BUDGET - batch_size + 1
    prefill_steps = batch_size * (context + BLOCK_SIZE) // prefill_tokens_per_step + batch_size
    return prefill_steps + WARM_UP_STEPS + steps + 1


def engine_config(
    model: str | None, batch_sizes: list[int], context: int, steps: int, threads: int | None
) -> EngineConfig:
    """A pool in which nothing is preempted."""
    longest = context + BLOCK_SIZE + output_tokens(max(batch_sizes), context, steps)
    return EngineConfig(
        model=model,
        max_num_seqs=max(batch_sizes),
        max_num_batched_tokens=BUDGET,
        block_size=BLOCK_SIZE,
        num_kv_blocks=max(batch_sizes) * (longest // BLOCK_SIZE + 1),
        num_threads=threads,
        skip_tokenizer_init=True,
    )


def decode_steps(engine: Engine, timer: SectionTimer, batch_size: int, context: int, steps: int) -> list[Sections]:
    """The sections of `steps` steps in which `batch_size` requests decode, from about `context` tokens on.

    Prompt lengths vary over one block, so that as many requests need a new block in one step as in the next.
    """
    output_len = output_tokens(batch_size, context, steps)
    workload = make_workload(
        seed=batch_size,
        count=batch_size,
        prompt=Uniform(context, context + BLOCK_SIZE - 1),
        output=Fixed(output_len),
        arrivals=AllAtOnce(),
        vocab_size=engine.model_config.vocab_size,
    )
    for request in forced_requests(engine, workload):
        engine.core.add(request.to_request())
    while len(engine.core.step()) < batch_size:
        pass
    for _ in range(WARM_UP_STEPS):
        engine.core.step()
    timer.take()
    taken: list[Sections] = []
    for _ in range(steps):
        assert len(engine.core.step()) == batch_size, "every request decodes in every measured step"
        taken.append(timer.take())
    abort(engine, workload)
    return taken


def abort(engine: Engine, workload: list[WorkloadRequest]) -> None:
    for item in workload:
        engine.core.abort(item.request_id)
    assert not engine.core.has_work


def milliseconds(taken: list[Sections]) -> dict[str, float]:
    """Medians over steps: each section, the whole step, and what is neither forward nor logits."""
    rows = {section: median(step[section] for step in taken) for section in SECTIONS}
    rows["outside the model"] = median(sum(step[section] for section in AROUND) for step in taken)
    rows["step"] = median(sum(step.values()) for step in taken)
    return {name: 1e3 * seconds for name, seconds in rows.items()}


def table(profiles: dict[int, dict[str, float]]) -> Table:
    result = Table(title="milliseconds a step (share of the step)", title_justify="left")
    result.add_column("")
    for batch_size in profiles:
        result.add_column(f"batch {batch_size}", justify="right")
    names = list(next(iter(profiles.values())))
    for name in names:
        if name == "outside the model":
            result.add_section()
        cells = [f"{p[name]:8.3f}  {p[name] / p['step']:6.1%}" for p in profiles.values()]
        result.add_row(name, *cells)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a .gguf file or a folder; the default model if not given")
    parser.add_argument("--batch-sizes", default="1,16,64")
    parser.add_argument("--context", type=int, default=128, help="tokens in memory when measuring starts, about")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--num-threads", type=int)
    args = parser.parse_args()
    batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    config = engine_config(args.model, batch_sizes, args.context, args.steps, args.num_threads)
    timer = SectionTimer()
    with timed_engine(config, timer) as engine:
        profiles = {
            size: milliseconds(decode_steps(engine, timer, size, args.context, args.steps)) for size in batch_sizes
        }
        name = engine.model_name
    Console().print(table(profiles))
    settings = {"model": name, "context": args.context, "steps": args.steps}
    record = {"benchmark": "profile_step", "machine": machine_facts().to_dict(), **settings, "milliseconds": profiles}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
