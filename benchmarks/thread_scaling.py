"""Predicts the time of the linear layers of a step for 1 to 128 threads, and compares it with measurements.

    python -m benchmarks.thread_scaling [--model PATH] [--format q4_0] [--rows 1,16,64,256] [--measured 1,2]
                                        [--threads 4,8,16,32,64,128] [--bandwidth-limit GB_PER_S] [--rounds 5] [--json]

A step of T rows on n threads takes

    max(bytes / read(n), T * operations / rate(n)) + jobs * meetings(T) * barrier(n)

Bytes, operations and the number of jobs (one for each product) come from the declaration of the model. In a job with
more than four rows all threads meet twice, after the rows are prepared and at the end, otherwise once. Attention adds
one job to each layer, and another one for prompts; it is not part of these numbers.

read(n), rate(n) (of the products themselves, with RATE_ROWS rows) and barrier(n) are measured with few threads, in
turn, and extended: every further thread adds as much as the measured ones did, up to the bandwidth limit for read(n),
and the cost of a barrier is proportional to the other threads, because each of them changes the same two counters.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

import torch
from benchmarks.common import print_result
from benchmarks.kernels import LAYERS, READ_BYTES, KernelWork, LinearPass, native_parts, numbers
from benchmarks.products import layer_products
from rich.console import RenderableType
from rich.table import Table

from chairlift.engine.startup.threads import default_num_threads
from chairlift.kernels.cpu import load
from chairlift.loading.model_source import declared_formats
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.matrix_spec import LM_HEAD
from chairlift.models.declaration.model_config import ModelConfig

RATE_ROWS: Final = 256
"""Number of rows with which the rate of products is measured: so many that memory is no limit."""

MAX_ROWS_OF_EACH_THREAD: Final = 4
"""Maximum number of rows that every thread prepares for itself (kRowsAtOnce in linear.cpp), without a barrier."""

MEASURING_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the linear layers of a model do in a step with one row.

    Attributes:
        num_bytes: bytes of all weights.
        operations: additions and multiplications.
        num_jobs: number of products.
    """

    num_bytes: float
    operations: float
    num_jobs: int

    def num_barriers(self, rows: int) -> int:
        """How often all threads meet in a step."""
        return self.num_jobs * (1 if rows <= MAX_ROWS_OF_EACH_THREAD else 2)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Speeds and costs by the number of threads.

    Args:
        read: measured bytes/s.
        rate: measured operations/s of products.
        barrier: measured seconds of a barrier.
        read_limit: maximum bytes/s of the memory; None if it is unknown.
    """

    read: Mapping[int, float]
    rate: Mapping[int, float]
    barrier: Mapping[int, float]
    read_limit: float | None = None

    def seconds(self, work: StepWork, rows: int, num_threads: int) -> float:
        """The predicted seconds of a step."""
        reading = work.num_bytes / min(extended(self.read, num_threads), self.read_limit or float("inf"))
        computing = rows * work.operations / extended(self.rate, num_threads)
        return max(reading, computing) + self.barrier_seconds(work, rows, num_threads)

    def barrier_seconds(self, work: StepWork, rows: int, num_threads: int) -> float:
        """The part of the step in which threads wait for each other."""
        others = {n: seconds / (n - 1) for n, seconds in self.barrier.items() if n > 1}
        each = median(others.values()) if others else 0.0
        return work.num_barriers(rows) * each * (num_threads - 1)


def extended(measured: Mapping[int, float], num_threads: int) -> float:
    """The speed of a number of threads on the line through the measurements with the fewest and the most threads."""
    few, many = min(measured), max(measured)
    if num_threads in measured or few == many:
        return measured.get(num_threads, measured[few] * num_threads / few)
    return measured[few] + (measured[many] - measured[few]) / (many - few) * (num_threads - few)


@dataclass(frozen=True, slots=True)
class Measurements:
    """The best of the rounds, by the number of threads: the scaling, and the seconds of steps by number of rows."""

    scaling: Scaling
    steps: dict[int, dict[int, float]]


def measure(layers: LinearPass, args: argparse.Namespace, work: StepWork) -> Measurements:
    """Measure all numbers of threads in turn in each round. The best round counts, because other work on the machine
    only adds time."""
    native = load()
    buffer = native.ReadBuffer(READ_BYTES)
    read, rate, barrier = (defaultdict[int, list[float]](list) for _ in range(3))
    steps: dict[int, defaultdict[int, list[float]]] = {n: defaultdict(list) for n in args.measured}
    for number in range(args.rounds + 1):
        for n in args.measured:
            native.set_num_threads(n)
            values = (
                buffer.measure(MEASURING_SECONDS),
                RATE_ROWS * work.operations / step_seconds(layers, RATE_ROWS),
                native.measure_barrier(MEASURING_SECONDS),
            )
            measured = {rows: step_seconds(layers, rows) for rows in args.rows}
            if number:  # the first round touches memory
                for samples, value in zip((read, rate, barrier), values, strict=True):
                    samples[n].append(value)
                for rows, seconds in measured.items():
                    steps[n][rows].append(seconds)
    limit = None if args.bandwidth_limit is None else args.bandwidth_limit * 1e9
    scaling = Scaling(
        {n: max(samples) for n, samples in read.items()},
        {n: max(samples) for n, samples in rate.items()},
        {n: min(samples) for n, samples in barrier.items()},
        limit,
    )
    return Measurements(scaling, {n: {rows: min(all_) for rows, all_ in by.items()} for n, by in steps.items()})


def step_seconds(layers: LinearPass, rows: int) -> float:
    seconds = layers(rows)
    return seconds[LAYERS] + seconds[LM_HEAD]


def model_work(model: ModelConfig, layers: LinearPass) -> StepWork:
    work = layers.work(1)
    total: KernelWork = work[LAYERS] + work[LM_HEAD]
    num_products = sum(len(layer_products(layer)) for layer in model.layers) + 1
    return StepWork(total.num_bytes, total.num_operations, num_products)


def measured_table(result: Measurements, work: StepWork, rows: Sequence[int]) -> Table:
    table = Table(title="measured and predicted, ms", title_justify="left")
    for column in ("threads", "rows", "measured", "predicted", "measured / predicted", "of which barriers"):
        table.add_column(column, justify="right")
    for n, steps in result.steps.items():
        for count in rows:
            predicted = result.scaling.seconds(work, count, n)
            waiting = result.scaling.barrier_seconds(work, count, n)
            cells = (f"{steps[count] * 1e3:.2f}", f"{predicted * 1e3:.2f}", f"{steps[count] / predicted:.2f}")
            table.add_row(str(n), str(count), *cells, f"{waiting * 1e3:.3f}")
    return table


def predicted_table(scaling: Scaling, work: StepWork, rows: Sequence[int], threads: Sequence[int]) -> Table:
    limit = "no limit" if scaling.read_limit is None else f"at most {scaling.read_limit / 1e9:.0f} GB/s"
    table = Table(
        title=f"PREDICTION, ms (share of barriers): bandwidth of memory grows with threads, {limit}",
        title_justify="left",
    )
    table.add_column("threads", justify="right")
    for count in rows:
        table.add_column(f"{count} rows", justify="right")
    for n in threads:
        cells = []
        for count in rows:
            seconds = scaling.seconds(work, count, n)
            share = scaling.barrier_seconds(work, count, n) / seconds
            cells.append(f"{seconds * 1e3:.2f} ({100 * share:.0f} %)")
        table.add_row(str(n), *cells)
    return table


def parse_arguments() -> argparse.Namespace:
    available = default_num_threads()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=".gguf file or folder; default: the default model")
    parser.add_argument("--format", help="format of all weights; default: those of the file")
    parser.add_argument("--rows", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--measured", type=numbers, default=sorted({1, available}), help="measured numbers of threads")
    parser.add_argument("--threads", type=numbers, default=[4, 8, 16, 32, 64, 128], help="predicted numbers of threads")
    parser.add_argument("--bandwidth-limit", type=float, help="maximum GB/s of the memory of the predicted machine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    source = resolve_model(args.model)
    model, name = source.config(), source.name
    found = source.formats(model) if args.format is None else declared_formats(model)
    del source  # It holds the open file.

    load().set_num_threads(max(args.measured))
    parts_of = partial(native_parts, formats=found, quantization=args.format)
    layers = LinearPass(model, parts_of, max(RATE_ROWS, *args.rows))
    work = model_work(model, layers)
    result = measure(layers, args, work)
    scaling = result.scaling
    parts: list[RenderableType] = [
        f"{name}: {work.num_bytes / 1e6:,.0f} MB of weights, {work.num_jobs} jobs; a step with 1 row has "
        f"{work.num_barriers(1)} barriers, with more than {MAX_ROWS_OF_EACH_THREAD} rows {work.num_barriers(64)}",
        *(
            f"{n} threads: reading {scaling.read[n] / 1e9:.1f} GB/s, products {scaling.rate[n] / 1e9:.0f} GOP/s, "
            f"barrier {scaling.barrier[n] * 1e6:.2f} µs"
            for n in args.measured
        ),
        measured_table(result, work, args.rows),
        predicted_table(scaling, work, args.rows, args.threads),
    ]
    predicted = {n: {rows: scaling.seconds(work, rows, n) for rows in args.rows} for n in args.threads}
    measured = {"read": scaling.read, "rate": scaling.rate, "barrier": scaling.barrier, "steps": result.steps}
    report = {"measured": measured, "predicted_seconds": predicted}
    print_result("thread_scaling", {**vars(args), "model": name}, report, parts, as_json=args.json)


if __name__ == "__main__":
    main()
