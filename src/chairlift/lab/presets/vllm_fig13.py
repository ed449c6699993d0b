"""Figure 13 of the PagedAttention paper: the number of running requests, by policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from chairlift.lab.presets import PresetOptions, PresetResult, Table
from chairlift.lab.presets import vllm_experiments as vllm
from chairlift.lab.workload.request import WorkloadRequest

NUM_PROMPTS: Final = {"sharegpt": 1200, "alpaca": 12_000}

PUBLISHED: Final = {
    "sharegpt": {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42},
    "alpaca": {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged": 132.44},
}
"""Mean number of batched requests at 2 (ShareGPT) and 30 (Alpaca) requests per second."""

NOTES: Final = [
    "Saturated: all requests arrive at once, and steps count while the queue is not empty. Every step has equal "
    "weight, so this batch depends on lengths and memory only; `by time` weights steps by their duration in the cost "
    "model.",
    "`requests/s` is the rate at which a saturated policy finishes requests. If it is less than the paper's rate, the "
    "queue grows, and the paper's batch is the saturated one. Paging finishes more requests than arrive in the paper, "
    "so its published batch is that of an engine below saturation.",
    "Below saturation the batch is the rate times the running time of a request, which depends on the cost model. The "
    "roofline is faster than the paper's engine of 2023, in which requests ran longer and overlapped more. Even Oracle "
    "is not saturated on Alpaca at 30 requests per second here, as it was in the paper.",
    "A few long outputs have a large effect under Pow2 and Oracle on Alpaca: while the head of the queue waits for a "
    "large piece, all requests behind it wait too, and the batch shrinks.",
]


def run(options: PresetOptions) -> PresetResult:
    """Simulates each data set under each policy, saturated, and with one seed at the paper's rates."""
    seed = options.workload_seed or 0
    tables = []
    ours: dict[str, Any] = {}
    counts, shown = vllm.prompt_counts(options, NUM_PROMPTS)
    for dataset, count in counts.items():
        workloads = [vllm.draw_requests(dataset, seed + i, count) for i in range(vllm.NUM_SEEDS)]
        table, ours[dataset] = _measure_policies(dataset, workloads)
        tables.append(table)
    return PresetResult(
        constants=[
            ("requests", f"{shown}, seeds {seed} to {seed + vllm.NUM_SEEDS - 1}"),
            vllm.COUNTED,
            *vllm.constants(),
        ],
        tables=tables,
        notes=NOTES,
        published=PUBLISHED,
        ours=ours,
    )


def _measure_policies(
    dataset: str, workloads: Sequence[Sequence[WorkloadRequest]]
) -> tuple[Table, dict[str, dict[str, float]]]:
    rows, ours = [], {}
    for kv, policy in vllm.POLICIES.items():
        runs = [vllm.steady_state(kv, requests) for requests in workloads]
        batch = vllm.SeedStatistics.from_values([run.batch for run in runs])
        numbers = {
            "saturated": batch.mean,
            "saturated_spread": batch.deviation,
            "saturated_by_time": vllm.SeedStatistics.from_values([run.batch_by_time for run in runs]).mean,
            "saturated_requests_per_s": vllm.SeedStatistics.from_values([run.requests_per_s for run in runs]).mean,
            "at_rate": vllm.steady_state(kv, workloads[0], vllm.RATES[dataset]).batch,
        }
        ours[kv] = {name: round(number, 2) for name, number in numbers.items()}
        published = f"{PUBLISHED[dataset][kv]:.2f}"
        rows.append([f"{policy}, {kv}", published, *(f"{number:.2f}" for number in numbers.values())])
    at_rate = f"ours, at {vllm.RATES[dataset]:g}/s"
    columns = ["policy", "published", "ours, saturated", "seeds, +-", "by time", "requests/s", at_rate]
    return Table(f"{vllm.DATASETS[dataset]}: mean number of running requests", columns, rows), ours
