"""Measures the share of the memory limit that decode steps reach: the time of reading what a step must read.

    python -m benchmarks.memory_limit [--model MODEL] [--batch-sizes 1,32] [--context 128] [--steps 48] [--rounds 3]
                                      [--load-format dummy] [--quantization q4_0] [--json]

The limit is the bytes of a step over the bandwidth: all weights once, recurrent states read and written, and K and V of
the context. The bandwidth is measured before each round, by one row times a matrix that is larger than the caches, as
by `chairlift simulate --calibrate`. Of a mixture of experts all weights are counted, so its share may exceed 1.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from benchmarks.common import print_result, spread
from benchmarks.profile_step import abort, begin_decoding, engine_config, set_threads
from rich.table import Table

from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.engine.startup.loaded_model import LoadedDecoder
from chairlift.engine.startup.pool_plan import kv_slot_bytes, sequence_state_bytes
from chairlift.engine.startup.weight_plan import step_weight_bytes
from chairlift.lab.bench.calibrate import measure_bandwidth


def main() -> None:
    options = parse_options()
    sizes = [int(size) for size in options.batch_sizes.split(",")]
    config = engine_config(
        options.model, sizes, options.context, options.steps, options.num_threads,
        load_format=options.load_format, quantization=options.quantization,
    )  # fmt: skip
    engine = build_engine(config)
    bandwidths: list[float] = []
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(options.rounds):
        set_threads(False, options.num_threads)
        bandwidths.append(measure_bandwidth())
        set_threads(True, options.num_threads)
        for size in sizes:
            seconds[size].append(step_seconds(engine, size, options.context, options.steps))
    report(options, engine, bandwidths, seconds)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=".gguf file or folder; default: the default model")
    parser.add_argument("--batch-sizes", default="1,32")
    parser.add_argument("--context", type=int, default=128, help="approximate number of tokens of context")
    parser.add_argument("--steps", type=int, default=48, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--load-format", default="auto", help="auto or dummy (random weights)")
    parser.add_argument("--quantization", help="format of the weights; default: those of the file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser.parse_args()


def step_seconds(engine: Engine, batch_size: int, context: int, steps: int) -> float:
    """The median time of a step in which `batch_size` requests decode."""
    workload = begin_decoding(engine, batch_size, context, steps)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        assert len(engine.core.step()) == batch_size, "every request decodes in every measured step"
        times.append(time.perf_counter() - started)
    abort(engine, workload)
    return median(times)


def step_bytes(engine: Engine, batch_size: int, context: int) -> dict[str, int]:
    """The bytes that a step reads or writes, by use."""
    loaded = engine.loaded
    assert isinstance(loaded, LoadedDecoder)
    memory = loaded.choice.memory(loaded.device.type)
    return {
        "weights": step_weight_bytes(loaded.config, memory, loaded.formats),
        "states": 2 * batch_size * sequence_state_bytes(loaded.config),
        "K and V": batch_size * context * kv_slot_bytes(loaded.config, loaded.choice.kv_cache_dtype),
    }


def report(
    options: argparse.Namespace, engine: Engine, bandwidths: list[float], seconds: dict[int, list[float]]
) -> None:
    table = Table("requests", "weights, MiB", "states, MiB", "K and V, MiB", "step, ms", "share of the limit, %")
    records = []
    for size, measured in seconds.items():
        parts = step_bytes(engine, size, options.context)
        total = sum(parts.values())
        shares = [total / rate / own for rate, own in zip(bandwidths, measured, strict=True)]
        cells = [f"{each / 2**20:.1f}" for each in parts.values()]
        table.add_row(
            str(size), *cells, spread([1e3 * each for each in measured]), spread([100 * each for each in shares])
        )
        records.append({"batch_size": size, "bytes": parts, "seconds": measured, "shares": shares})
    rates = f"bandwidth: {spread([each / 1e9 for each in bandwidths])} GB/s"
    results = {"model": engine.facts.model_name, "bandwidth": bandwidths, "runs": records}
    print_result("memory_limit", vars(options), results, [rates, table], as_json=options.json)


if __name__ == "__main__":
    main()
