"""What more users and longer contexts cost: throughput and ITL by concurrent requests, and ITL by context.

    python benchmarks/concurrency.py [--model PATH] [--concurrency 1,2,4,8,16,32,64,128,256]
                                     [--contexts 128,256,512,...] [--batch-sizes 1,8] [--steps 12]
                                     [--num-threads N] [--output docs/images/concurrency.png]

By concurrency: a closed loop of so many users, each of whom sends the next request when the last one has been
answered, two requests a user (four in all at least); prompts of 64 to 192 tokens, outputs of 16 to 48, both uniform and
forced, greedy. Everything counts, from the first arrival to the last token, prompts included.

By context: batches of requests that all decode, from about that many tokens in KV memory on. Their prompts begin with
those of the shorter contexts, so the prefix cache has them, and only what is new is computed. A context that leaves no
room for the measured steps below the model's longest is that much shorter.

Draws one figure, and prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator
from rich.console import Console
from rich.table import Table

from chairlift.config import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineConfig
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.engine.startup.loaded_model import LoadedModel, load_model
from chairlift.errors import ChairliftError, ConfigError
from chairlift.events import EventList, Step
from chairlift.lab.bench.driver import drive
from chairlift.lab.bench.machine import machine_facts
from chairlift.lab.bench.workload_options import check_minimums
from chairlift.lab.metrics.percentile import percentile
from chairlift.lab.metrics.run import summarize
from chairlift.lab.report.build import DOTS_PER_INCH
from chairlift.lab.report.figures.drawing import STYLE, WIDTH, point_style, start_at_zero
from chairlift.lab.tables import number
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import UniformLengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload

PROMPT, OUTPUT = UniformLengths(64, 192), UniformLengths(16, 48)
REQUESTS_A_USER, FEWEST_REQUESTS = 2, 4
LONGEST_REQUEST = 192 + 48
BLOCK_SIZE: Final = DEFAULT_BLOCK_SIZE
WARM_UP_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `concurrency` users. Seconds."""

    concurrency: int
    num_requests: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50: float
    itl_p50: float
    itl_p99: float
    mean_batch_size: float


@dataclass(frozen=True, slots=True)
class Decode:
    """Steps in which `batch_size` requests decode at `context` tokens. Seconds; ITL is the time of a step."""

    batch_size: int
    context: int
    num_steps: int
    itl_p50: float
    itl_min: float
    itl_max: float


# -- by concurrency ------------------------------------------------------------------------------------------------


def run_loads(loaded: LoadedModel, concurrencies: Sequence[int], budget: int) -> list[Load]:
    """One engine for all of them, each with tokens of its own."""
    seats = max(concurrencies)
    log = EventList()
    config = _engine_config(loaded, seats, max(budget, seats), seats * (-(-LONGEST_REQUEST // BLOCK_SIZE) + 1))
    engine = build_engine(config, loaded=loaded, events=log)
    _run_load(engine, log, 2, 0)
    return [_run_load(engine, log, concurrency, turn) for turn, concurrency in enumerate(concurrencies, 1)]


def _run_load(engine: Engine, log: EventList, concurrency: int, turn: int) -> Load:
    del log.events[1:]
    count = max(FEWEST_REQUESTS, REQUESTS_A_USER * concurrency)
    vocab_size = engine.facts.model_config.vocab_size
    drive(engine, make_workload(0, count, PROMPT, OUTPUT, ArrivalProcess(), vocab_size, token_round=turn), concurrency)
    run = summarize(log.events)
    assert run.ttft is not None
    assert run.itl is not None
    assert not run.preemptions, "the pool holds all requests"
    print(f"{concurrency} users: {run.output_tokens_per_s:.1f} output tokens/s", file=sys.stderr)
    return Load(
        concurrency,
        count,
        run.output_tokens_per_s,
        run.total_tokens_per_s,
        run.ttft.p50,
        run.itl.p50,
        run.itl.p99,
        run.mean_batch_size,
    )


# -- by context ----------------------------------------------------------------------------------------------------


def run_contexts(
    loaded: LoadedModel, batch_sizes: Sequence[int], contexts: Sequence[int], steps: int, budget: int
) -> list[Decode]:
    """Contexts ascending, so that every prompt finds the one before in the prefix cache."""
    tail = output_tokens(max(batch_sizes), steps)
    longest = min(max(contexts) + tail, loaded.config.max_position_embeddings)
    seats = max(batch_sizes)
    log = EventList()
    config = _engine_config(loaded, seats, max(budget, seats), seats * (-(-longest // BLOCK_SIZE) + 2), longest)
    engine = build_engine(config, loaded=loaded, events=log)
    rng = random.Random(0)
    tokens = [[rng.randrange(loaded.config.vocab_size) for _ in range(longest)] for _ in range(seats)]
    return [
        _decode(engine, log, tokens[:batch_size], min(context, longest - tail), steps)
        for context in sorted(set(contexts))
        for batch_size in sorted(set(batch_sizes), reverse=True)
    ]


def _decode(engine: Engine, log: EventList, tokens: Sequence[list[int]], context: int, steps: int) -> Decode:
    """A first round computes the prompts; the second finds them, and all of its requests decode soon."""
    batch_size = len(tokens)
    prompts = [of_one[:context] for of_one in tokens]
    drive(engine, [WorkloadRequest(f"fill-{context}-{i}", 0.0, p, 1) for i, p in enumerate(prompts)])
    del log.events[1:]
    output_len = output_tokens(batch_size, steps)
    drive(engine, [WorkloadRequest(f"decode-{context}-{i}", 0.0, p, output_len) for i, p in enumerate(prompts)])
    seconds = decode_seconds(log, batch_size)[WARM_UP_STEPS:][:steps]
    assert len(seconds) == steps, "all requests decode together for long enough"
    print(f"batch {batch_size} at {context}: {1e3 * median(seconds):.2f} ms a step", file=sys.stderr)
    return Decode(batch_size, context, len(seconds), percentile(seconds, 50), min(seconds), max(seconds))


def output_tokens(batch_size: int, steps: int) -> int:
    """Enough for all requests to decode together in that many steps, even if each begins a step after the other."""
    return steps + WARM_UP_STEPS + batch_size


def decode_seconds(log: EventList, batch_size: int) -> list[float]:
    """From one result to the next, of the steps that give every request a token and compute nothing else."""
    steps = [event for event in log.events if isinstance(event, Step)]
    return [
        step.time - before.time
        for before, step in pairwise(steps)
        if len(step.request_ids) == batch_size and all(count == 1 for count in step.num_scheduled)
    ]


def _engine_config(
    loaded: LoadedModel, seats: int, budget: int, num_blocks: int, max_model_len: int | None = None
) -> EngineConfig:
    """For the loaded model, with a pool in which nothing is preempted."""
    return replace(
        loaded.engine_config,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        max_model_len=max_model_len,
    )


def contexts_of(text: str | None, model_context: int) -> list[int]:
    """The contexts to be measured: powers of two from 128 on, up to what the model has, if nothing is said."""
    if text is None:
        return [1 << power for power in range(7, model_context.bit_length())]
    contexts = _integers("contexts", text)
    if max(contexts) > model_context:
        raise ConfigError(f"contexts must be at most {model_context} for this model, got {max(contexts)}")
    return contexts


def _integers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} must be integers with commas between them, got {text!r}") from None
    if min(numbers) < 1:
        raise ConfigError(f"{name} must be at least 1, got {min(numbers)}")
    return numbers


# -- the picture ---------------------------------------------------------------------------------------------------


def draw(loads: Sequence[Load], decodes: Sequence[Decode]) -> Figure:
    """Throughput and ITL by concurrency, ITL by context."""
    figure = Figure(figsize=(WIDTH, 2.7))
    speed, gaps, contexts = figure.subplots(1, 3)
    users = [load.concurrency for load in loads]
    speed.plot(users, [load.output_tokens_per_s for load in loads], **point_style(0))
    speed.set(title="output tokens/s", xlabel="concurrent requests")
    gaps.plot(users, [load.itl_p50 for load in loads], label="p50", **point_style(0))
    gaps.plot(users, [load.itl_p99 for load in loads], label="p99", **point_style(1))
    gaps.set(title="ITL", xlabel="concurrent requests")
    for index, batch_size in enumerate(sorted({each.batch_size for each in decodes})):
        steps = [each for each in decodes if each.batch_size == batch_size]
        label, style = f"{batch_size} decoding", point_style(index)
        contexts.plot([each.context for each in steps], [each.itl_p50 for each in steps], label=label, **style)
    contexts.set(title="ITL by context", xlabel="tokens in KV memory")
    for axes, values in ((speed, users), (gaps, users), (contexts, [each.context for each in decodes])):
        _scale(axes, sorted(set(values)))
    for axes in (gaps, contexts):
        axes.yaxis.set_major_formatter(EngFormatter(unit="s", sep=""))
        axes.set_ylim(top=1.25 * axes.get_ylim()[1])
        axes.legend(loc="upper left", ncols=2)
    return figure


def _scale(axes: Axes, values: Sequence[int]) -> None:
    """Powers of two, every other one of many labelled; upwards from 0."""
    axes.set_xscale("log", base=2)
    shown = values[:: 2 if len(values) > 5 else 1]
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{value // 1024}k" if value % 1024 == 0 else str(value) for value in shown])
    axes.grid(True, color="#DDDDDD", linewidth=0.5)
    start_at_zero(axes)


def save(figure: Figure, path: Path) -> None:
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata=metadata)


# -- the tables ----------------------------------------------------------------------------------------------------


def load_table(loads: Sequence[Load]) -> Table:
    table = Table(title="by concurrent requests", title_justify="left")
    for column in ("users", "output tokens/s", "all tokens/s", "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms", "batch"):
        table.add_column(column, justify="right")
    for load in loads:
        milliseconds = (1e3 * seconds for seconds in (load.ttft_p50, load.itl_p50, load.itl_p99))
        values = (load.output_tokens_per_s, load.total_tokens_per_s, *milliseconds, load.mean_batch_size)
        table.add_row(str(load.concurrency), *map(number, values))
    return table


def decode_table(decodes: Sequence[Decode]) -> Table:
    table = Table(title="decode steps by context", title_justify="left")
    for column in ("context", "batch", "ITL p50, ms", "min", "max", "tokens/s"):
        table.add_column(column, justify="right")
    for each in decodes:
        milliseconds = (1e3 * seconds for seconds in (each.itl_p50, each.itl_min, each.itl_max))
        speed = each.batch_size / each.itl_p50
        table.add_row(f"{each.context:,}", str(each.batch_size), *map(number, (*milliseconds, speed)))
    return table


# -- the command ---------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the default model if not given")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--contexts", help="powers of two from 128 to the model's longest if not given")
    parser.add_argument("--batch-sizes", default="1,8", help="requests that decode at each context")
    parser.add_argument("--steps", type=int, default=12, help="measured at each context")
    parser.add_argument("--max-num-batched-tokens", type=int, default=DEFAULT_MAX_NUM_BATCHED_TOKENS)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--num-threads", type=int, help="all if not given")
    default = Path(__file__).parents[1] / "docs" / "images" / "concurrency.png"
    parser.add_argument("--output", type=Path, default=default, help="the figure: .png or .svg")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    users, batch_sizes = _integers("concurrency", args.concurrency), _integers("batch_sizes", args.batch_sizes)
    check_minimums(args, steps=1)
    config = EngineConfig(
        model=args.model,
        kernels=args.kernels,
        num_threads=args.num_threads,
        skip_tokenizer_init=True,
    )
    loaded = load_model(config)
    contexts = contexts_of(args.contexts, loaded.config.max_position_embeddings)
    loads = run_loads(loaded, users, args.max_num_batched_tokens)
    decodes = run_contexts(loaded, batch_sizes, contexts, args.steps, args.max_num_batched_tokens)
    with mpl.rc_context(STYLE):
        save(draw(loads, decodes), args.output)
    console = Console()
    console.print(load_table(loads))
    console.print(decode_table(decodes))
    record: dict[str, Any] = {
        "benchmark": "concurrency",
        "machine": machine_facts().to_dict(),
        "model": loaded.name,
        "kv_cache_dtype": loaded.choice.kv_cache_dtype,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "concurrency": [asdict(load) for load in loads],
        "contexts": [asdict(each) for each in decodes],
    }
    print(json.dumps(record))


if __name__ == "__main__":
    try:
        main()
    except ChairliftError as error:
        sys.exit(f"error: {error}")
