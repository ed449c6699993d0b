"""Measures by block size how long a preempted request takes to have its K and V again, swapped and recomputed (Kwon et
al., SOSP'23, Figure 19a).

    python -m benchmarks.preemption_cost [MODEL] [--tokens 256] [--repeats 5] [--device cpu] [--num-threads N] [--json]

Swapping copies the blocks of the request out of the pool and back into other blocks. Recomputation is a step with all
of its tokens. `chairlift simulate --preset vllm-fig19` computes both for the machine of the paper.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median

import torch
from benchmarks.common import print_result
from rich.table import Table

from chairlift import LLM, SamplingParams
from chairlift.engine.startup.disk_prefix_cache import kv_caches
from chairlift.engine.startup.loaded_model import LoadedDecoder
from chairlift.outputs import SchedulerOutput
from chairlift.worker.block_copier import BlockCopier

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def seconds_of(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median time of a function, until the device has done its work. The first call is not counted."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return median(times[1:])


def measure(options: argparse.Namespace, block_size: int) -> dict[str, float]:
    """The milliseconds of both ways with one block size."""
    num_blocks = -(-options.tokens // block_size)
    llm = LLM(
        options.model,
        device=options.device,
        num_threads=options.num_threads,
        block_size=block_size,
        num_kv_blocks=2 * num_blocks + 2,
        max_num_batched_tokens=max(options.tokens, 64),
        enable_prefix_caching=False,
    )
    loaded = llm.engine.loaded
    assert isinstance(loaded, LoadedDecoder)
    copier = BlockCopier(kv_caches(loaded), num_blocks)
    out = SchedulerOutput(0, {}, swapped_out={index: index for index in range(num_blocks)})
    back = SchedulerOutput(0, {}, swapped_in={num_blocks + index: index for index in range(num_blocks)})
    prompt = [random.Random(options.seed).randrange(1000) for _ in range(options.tokens)]
    params = SamplingParams(temperature=0, max_tokens=1)
    values = {
        "swap_out_ms": seconds_of(lambda: copier.begin(out), options.repeats, loaded.device),
        "swap_in_ms": seconds_of(lambda: copier.begin(back), options.repeats, loaded.device),
        "recompute_ms": seconds_of(
            lambda: llm.generate([prompt], params, use_tqdm=False), options.repeats, loaded.device
        ),
    }
    llm.close()
    return {name: 1e3 * seconds for name, seconds in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    rows = {block_size: measure(options, block_size) for block_size in BLOCK_SIZES}
    table = Table(title=f"A preempted request of {options.tokens} tokens, milliseconds")
    for heading in ("block size", "swap out", "swap in", "both", "recompute"):
        table.add_column(heading, justify="right")
    for block_size, row in rows.items():
        both = row["swap_out_ms"] + row["swap_in_ms"]
        table.add_row(
            str(block_size),
            *(f"{value:.2f}" for value in (row["swap_out_ms"], row["swap_in_ms"], both, row["recompute_ms"])),
        )
    print_result("preemption_cost", vars(options), rows, [table], as_json=options.json)


if __name__ == "__main__":
    main()
