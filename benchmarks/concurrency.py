"""Measures throughput and ITL by the number of concurrent requests, and ITL by context.

    python -m benchmarks.concurrency [--model PATH] [--concurrency 1,2,4,8,16,32,64,128,256]
                                     [--contexts 128,256,512,...] [--batch-sizes 1,8] [--steps 12]
                                     [--num-threads N] [--output docs/images/concurrency.png] [--json]

By concurrency: a closed loop of users, which each send the next request when the previous one has been answered. There
are two requests per user and at least four in total, with prompts of 64 to 192 tokens and outputs of 16 to 48. Both
lengths are uniform and forced, and decoding is greedy. The measured time begins with the first arrival, ends with the
last token, and includes the prompts.

By context: batches of requests that all decode, beginning at about that many tokens in KV memory. Each prompt begins
with the prompt of the shorter context, which the prefix cache has, so only the new tokens are computed. The longest
context is shortened if the measured steps would exceed the limit of the model.

The script draws one figure, and prints two tables.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import matplotlib as mpl
from benchmarks.common import print_result
from benchmarks.drawing import DOTS_PER_INCH, STYLE, WIDTH, line_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator
from rich.table import Table

from chairlift.config import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineConfig
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.engine.startup.loaded_model import LoadedModel, load_model
from chairlift.errors import ChairliftError, ConfigError
from chairlift.events import EventList, Step
from chairlift.lab.bench.driver import drive
from chairlift.lab.metrics.run import summarize
from chairlift.lab.tables import number
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload

PROMPT, OUTPUT = parse_lengths("uniform:64..192"), parse_lengths("uniform:16..48")
REQUESTS_PER_USER, MIN_REQUESTS = 2, 4
LONGEST_REQUEST = 192 + 48
BLOCK_SIZE: Final = DEFAULT_BLOCK_SIZE
WARM_UP_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class ClosedLoopFigures:
    """The figures of a closed loop of `concurrency` users. Times are in seconds."""

    concurrency: int
    num_requests: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50: float
    itl_p50: float
    itl_p99: float
    mean_batch_size: float


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """The figures of steps in which `batch_size` requests decode at `context` tokens. ITL is the time of a step in
    seconds."""

    batch_size: int
    context: int
    num_steps: int
    itl_p50: float
    itl_min: float
    itl_max: float


# -- by concurrency ------------------------------------------------------------------------------------------------


def measure_concurrencies(loaded: LoadedModel, concurrencies: Sequence[int], budget: int) -> list[ClosedLoopFigures]:
    """Measure all closed loops on one engine. Their tokens differ."""
    seats = max(concurrencies)
    log = EventList()
    config = _engine_config(loaded, seats, max(budget, seats), seats * (-(-LONGEST_REQUEST // BLOCK_SIZE) + 1))
    engine = build_engine(config, loaded=loaded, events=log)
    _measure_concurrency(engine, log, 2, 0)
    return [
        _measure_concurrency(engine, log, concurrency, token_round)
        for token_round, concurrency in enumerate(concurrencies, 1)
    ]


def _measure_concurrency(engine: Engine, log: EventList, concurrency: int, token_round: int) -> ClosedLoopFigures:
    del log.events[1:]
    count = max(MIN_REQUESTS, REQUESTS_PER_USER * concurrency)
    vocab_size = engine.facts.model_config.vocab_size
    drive(
        engine,
        make_workload(0, count, PROMPT, OUTPUT, ArrivalProcess(), vocab_size, token_round=token_round),
        concurrency,
    )
    run = summarize(log.events)
    assert run.ttft is not None
    assert run.itl is not None
    assert not run.preemptions, "the pool holds all requests"
    print(f"{concurrency} users: {run.output_tokens_per_s:.1f} output tokens/s", file=sys.stderr)
    return ClosedLoopFigures(
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


def measure_contexts(
    loaded: LoadedModel, batch_sizes: Sequence[int], contexts: Sequence[int], steps: int, budget: int
) -> list[DecodeFigures]:
    """Measure the contexts in ascending order, so that the prefix cache has the beginning of every prompt."""
    tail = output_tokens(max(batch_sizes), steps)
    longest = min(max(contexts) + tail, loaded.config.max_position_embeddings)
    seats = max(batch_sizes)
    log = EventList()
    config = _engine_config(loaded, seats, max(budget, seats), seats * (-(-longest // BLOCK_SIZE) + 2), longest)
    engine = build_engine(config, loaded=loaded, events=log)
    rng = random.Random(0)
    tokens = [[rng.randrange(loaded.config.vocab_size) for _ in range(longest)] for _ in range(seats)]
    return [
        _measure_decode(engine, log, tokens[:batch_size], min(context, longest - tail), steps)
        for context in sorted(set(contexts))
        for batch_size in sorted(set(batch_sizes), reverse=True)
    ]


def _measure_decode(
    engine: Engine, log: EventList, tokens: Sequence[list[int]], context: int, steps: int
) -> DecodeFigures:
    """Measure the decode steps of one batch.

    A first round computes the prompts. In the second one the prefix cache has them, so all requests decode soon.
    """
    batch_size = len(tokens)
    prompts = [request_tokens[:context] for request_tokens in tokens]
    drive(engine, [WorkloadRequest(f"fill-{context}-{i}", 0.0, p, 1) for i, p in enumerate(prompts)])
    del log.events[1:]
    output_len = output_tokens(batch_size, steps)
    drive(engine, [WorkloadRequest(f"decode-{context}-{i}", 0.0, p, output_len) for i, p in enumerate(prompts)])
    seconds = decode_step_seconds(log, batch_size)[WARM_UP_STEPS:][:steps]
    assert len(seconds) == steps, "all requests decode together for long enough"
    print(f"batch {batch_size} at {context}: {1e3 * median(seconds):.2f} ms a step", file=sys.stderr)
    return DecodeFigures(batch_size, context, len(seconds), median(seconds), min(seconds), max(seconds))


def output_tokens(batch_size: int, steps: int) -> int:
    """The output length with which all requests decode together in `steps` steps, even if they start one step apart."""
    return steps + WARM_UP_STEPS + batch_size


def decode_step_seconds(log: EventList, batch_size: int) -> list[float]:
    """The seconds of each step in which every request decodes one token and nothing else is computed."""
    steps = [event for event in log.events if isinstance(event, Step)]
    return [
        step.time - before.time
        for before, step in pairwise(steps)
        if len(step.request_ids) == batch_size and all(count == 1 for count in step.num_scheduled)
    ]


def _engine_config(
    loaded: LoadedModel, seats: int, budget: int, num_blocks: int, max_model_len: int | None = None
) -> EngineConfig:
    """The configuration of an engine for the loaded model, with a pool in which no request is preempted."""
    return replace(
        loaded.engine_config,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        max_model_len=max_model_len,
    )


def parse_contexts(text: str | None, model_context: int) -> list[int]:
    """Parse the contexts to measure. None selects the powers of two from 128 to the context of the model."""
    if text is None:
        return [1 << power for power in range(7, model_context.bit_length())]
    contexts = _parse_integers("contexts", text)
    if max(contexts) > model_context:
        raise ConfigError(f"contexts must be at most {model_context} for this model, got {max(contexts)}")
    return contexts


def _parse_integers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} must be integers separated by commas, got {text!r}") from None
    if min(numbers) < 1:
        raise ConfigError(f"{name} must be at least 1, got {min(numbers)}")
    return numbers


# -- the figure ----------------------------------------------------------------------------------------------------


def draw(loops: Sequence[ClosedLoopFigures], decodes: Sequence[DecodeFigures]) -> Figure:
    """Throughput and ITL by concurrency, ITL by context."""
    figure = Figure(figsize=(WIDTH, 2.7))
    speed, gaps, contexts = figure.subplots(1, 3)
    users = [loop.concurrency for loop in loops]
    speed.plot(users, [loop.output_tokens_per_s for loop in loops], **point_style(0))
    speed.set(title="output tokens/s", xlabel="concurrent requests")
    gaps.plot(users, [loop.itl_p50 for loop in loops], label="p50", **point_style(0))
    gaps.plot(users, [loop.itl_p99 for loop in loops], label="p99", **point_style(1))
    gaps.set(title="ITL", xlabel="concurrent requests")
    for index, batch_size in enumerate(sorted({figures.batch_size for figures in decodes})):
        steps = [figures for figures in decodes if figures.batch_size == batch_size]
        label, style = f"{batch_size} decoding", point_style(index)
        contexts.plot(
            [figures.context for figures in steps], [figures.itl_p50 for figures in steps], label=label, **style
        )
    contexts.set(title="ITL by context", xlabel="tokens in KV memory")
    for axes, values in ((speed, users), (gaps, users), (contexts, [figures.context for figures in decodes])):
        _scale(axes, sorted(set(values)))
    for axes in (gaps, contexts):
        axes.yaxis.set_major_formatter(EngFormatter(unit="s", sep=""))
        axes.set_ylim(top=1.25 * axes.get_ylim()[1])
        axes.legend(loc="upper left", ncols=2)
    return figure


def point_style(index: int) -> dict[str, Any]:
    """The colour, dashes and marker of the line at `index`."""
    return {**line_style(index), "marker": "os^DvPX"[index % 7], "markersize": 5}


def _scale(axes: Axes, values: Sequence[int]) -> None:
    """Scale the horizontal axis by powers of two, label every second one if there are many, and
    start the vertical axis at 0."""
    axes.set_xscale("log", base=2)
    shown = values[:: 2 if len(values) > 5 else 1]
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{value // 1024}k" if value % 1024 == 0 else str(value) for value in shown])
    axes.grid(True, color="#DDDDDD", linewidth=0.5)
    axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1)


def save(figure: Figure, path: Path) -> None:
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata=metadata)


# -- the tables ----------------------------------------------------------------------------------------------------


def concurrency_table(loops: Sequence[ClosedLoopFigures]) -> Table:
    table = Table(title="by concurrent requests", title_justify="left")
    for column in ("users", "output tokens/s", "all tokens/s", "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms", "batch"):
        table.add_column(column, justify="right")
    for loop in loops:
        milliseconds = (1e3 * seconds for seconds in (loop.ttft_p50, loop.itl_p50, loop.itl_p99))
        values = (loop.output_tokens_per_s, loop.total_tokens_per_s, *milliseconds, loop.mean_batch_size)
        table.add_row(str(loop.concurrency), *map(number, values))
    return table


def decode_table(decodes: Sequence[DecodeFigures]) -> Table:
    table = Table(title="decode steps by context", title_justify="left")
    for column in ("context", "batch", "ITL p50, ms", "min", "max", "tokens/s"):
        table.add_column(column, justify="right")
    for figures in decodes:
        milliseconds = (1e3 * seconds for seconds in (figures.itl_p50, figures.itl_min, figures.itl_max))
        speed = figures.batch_size / figures.itl_p50
        table.add_row(f"{figures.context:,}", str(figures.batch_size), *map(number, (*milliseconds, speed)))
    return table


# -- the command ---------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=".gguf file or folder; default: the default model")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--contexts", help="default: powers of two from 128 to the context of the model")
    parser.add_argument("--batch-sizes", default="1,8", help="requests that decode at each context")
    parser.add_argument("--steps", type=int, default=12, help="number of measured steps at each context")
    parser.add_argument("--max-num-batched-tokens", type=int, default=DEFAULT_MAX_NUM_BATCHED_TOKENS)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--num-threads", type=int, help="number of CPU threads; default: all cores")
    default = Path(__file__).parents[1] / "docs" / "images" / "concurrency.png"
    parser.add_argument("--output", type=Path, default=default, help="the figure: .png or .svg")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    users = _parse_integers("concurrency", args.concurrency)
    batch_sizes = _parse_integers("batch_sizes", args.batch_sizes)
    if args.steps < 1:
        raise ConfigError(f"steps must be at least 1, got {args.steps}")
    config = EngineConfig(
        model=args.model,
        kernels=args.kernels,
        num_threads=args.num_threads,
        skip_tokenizer_init=True,
    )
    loaded = load_model(config)
    contexts = parse_contexts(args.contexts, loaded.config.max_position_embeddings)
    loops = measure_concurrencies(loaded, users, args.max_num_batched_tokens)
    decodes = measure_contexts(loaded, batch_sizes, contexts, args.steps, args.max_num_batched_tokens)
    with mpl.rc_context(STYLE):
        save(draw(loops, decodes), args.output)
    options = {**vars(args), "model": loaded.name, "kv_cache_dtype": loaded.choice.kv_cache_dtype}
    del options["output"]
    results = {"concurrency": list(map(asdict, loops)), "contexts": list(map(asdict, decodes))}
    tables = [concurrency_table(loops), decode_table(decodes)]
    print_result("concurrency", options, results, tables, as_json=args.json)


if __name__ == "__main__":
    try:
        main()
    except ChairliftError as error:
        sys.exit(f"error: {error}")
