"""Figure 18b of the PagedAttention paper: latency under paging by block size."""

from __future__ import annotations

from typing import Any, Final

from chairlift.lab.metrics.run import RunMetrics
from chairlift.lab.presets import PresetOptions, PresetResult, Table
from chairlift.lab.presets import vllm_experiments as vllm
from chairlift.lab.presets.capacity import at_rate, measure

BLOCK_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_PROMPTS: Final = {"sharegpt": 600, "alpaca": 3000}

BUSY_RATES: Final = {"sharegpt": 2.5, "alpaca": 60.0}
"""Requests per second, slightly below the saturated rate of paging (see vllm-fig13)."""

TOLERANCE: Final = 1.05
"""A block size is among the best if its latency is at most this multiple of the lowest."""

PUBLISHED: Final = {"sharegpt": [16, 128], "alpaca": [16, 32]}
"""The smallest and the largest block size with the best latency (section 7.2)."""

NOTES: Final = [
    "The cost model reads K and V of a token in the same time for every block size, so small blocks have no cost here. "
    "On a GPU they do: a warp reads one block at a time, and a table of small blocks is long. This explains the lower "
    "ends of the published ranges, which this simulation cannot reproduce.",
    "The upper ends are explained by memory: a request wastes half a block on average, so with large blocks fewer "
    "requests run together, and more are preempted and recomputed. On ShareGPT under load our upper end is lower, "
    "because a large block has no advantage here that compensates for its waste.",
    "The rates of the figure were not published. At those of Figure 13 the roofline does not fill the memory, and the "
    "block size has little effect, so a second rate is slightly below the highest that paging sustains.",
]


def run(options: PresetOptions) -> PresetResult:
    """Simulates each block size on each data set at two rates."""
    seed = options.workload_seed or 0
    counts, shown = vllm.prompt_counts(options, NUM_PROMPTS)
    tables: list[Table] = []
    ours: dict[str, Any] = {}
    for dataset, count in counts.items():
        requests, ours[dataset] = vllm.draw_requests(dataset, seed, count), {}
        for name, rate in (("figure_13_rate", vllm.RATES[dataset]), ("busy_rate", BUSY_RATES[dataset])):
            scaled, configs = at_rate(requests, rate), {n: vllm.sim_config("paged", block_size=n) for n in BLOCK_SIZES}
            runs = {size: measure(scaled, config, vllm.cost_model()) for size, config in configs.items()}
            latencies = {size: _normalized_latency(metrics) for size, metrics in runs.items()}
            best = best_sizes(latencies)
            ours[dataset][name] = {
                "requests_per_s": rate,
                "normalized_latency_s": {size: round(latency, 4) for size, latency in latencies.items()},
                "best": best,
            }
            tables.append(_table(dataset, rate, runs, best))
    return PresetResult(
        constants=[
            ("requests", f"{shown}, Poisson arrivals, seed {seed}"),
            ("best", f"latency at most {TOLERANCE} times the lowest"),
            (
                "KV pool by block size",
                f"as many whole blocks as {vllm.NUM_SLOTS:,} slots give; not always {vllm.NUM_SLOTS // 16}",
            ),
            *vllm.constants(),
        ],
        tables=tables,
        notes=NOTES,
        published={dataset: {"best": sizes} for dataset, sizes in PUBLISHED.items()},
        ours=ours,
    )


def best_sizes(latencies: dict[int, float]) -> list[int]:
    """Returns the smallest and the largest block size whose latency is among the best."""
    lowest = min(latencies.values())
    best = [size for size, latency in latencies.items() if latency <= TOLERANCE * lowest]
    return [min(best), max(best)]


def _normalized_latency(metrics: RunMetrics) -> float:
    assert metrics.normalized_latency is not None, "every request has finished"
    return metrics.normalized_latency.mean


def _table(dataset: str, rate: float, runs: dict[int, RunMetrics], best: list[int]) -> Table:
    low, high = PUBLISHED[dataset]
    rows = [
        [
            str(size),
            "best" if low <= size <= high else "",
            "best" if best[0] <= size <= best[1] else "",
            f"{_normalized_latency(metrics):.4f}",
            f"{metrics.mean_batch_size:.1f}",
            str(metrics.preemptions),
        ]
        for size, metrics in runs.items()
    ]
    columns = ["block size", "published", "ours", "normalized latency, s/token", "batch", "preemptions"]
    return Table(f"{vllm.DATASETS[dataset]} at {rate:g} requests/s: which block sizes are best", columns, rows)
