"""Figure 13 of the PagedAttention paper: how many requests run at once, by policy."""

from __future__ import annotations

from typing import Any, Final

from chairlift.lab.presets import Preset, PresetOptions, PresetResult, Table
from chairlift.lab.presets.vllm_setting import DATASETS, POLICIES, RATES, Load, constants
from chairlift.lab.presets.vllm_steady import NUM_SEEDS, Spread, steady_state

NUM_PROMPTS: Final = {"sharegpt": 1200, "alpaca": 12_000}

PUBLISHED: Final = {
    "sharegpt": {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42},
    "alpaca": {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged": 132.44},
}
"""Mean number of batched requests at 2 (ShareGPT) and 30 (Alpaca) requests a second."""

NOTES: Final = [
    "Saturated: all requests at once, over the steps in which the queue is not empty. Every step counts alike, so this "
    "batch follows from lengths and memory alone; `by time` weighs steps by what the cost model says they last.",
    "`requests/s` is what a policy ends while saturated. Where that is less than the paper's rate, the queue grows, "
    "and the paper's batch is the saturated one. Paging ends more than the paper's rates bring, so its published batch "
    "is that of a busy engine and not of a full one.",
    "Below saturation the batch is the rate times the time that a request runs, and that is the cost model's. The "
    "roofline is faster than the paper's engine of 2023, where requests ran longer and met more others; it even leaves "
    "Oracle unsaturated on Alpaca at 30 requests a second, where the paper's was full.",
    "A few long outputs decide much under Pow2 and Oracle on Alpaca: while the head of the queue waits for a large "
    "piece, everybody behind it waits too, and the batch shrinks.",
]


def run(options: PresetOptions) -> PresetResult:
    """Each data set under each policy, saturated; and one seed at the paper's rates."""
    seed = options.workload_seed or 0
    tables = []
    ours: dict[str, Any] = {}
    counts = {dataset: options.num_prompts or count for dataset, count in NUM_PROMPTS.items()}
    for dataset, count in counts.items():
        loads = [Load.draw(dataset, seed + i, count) for i in range(NUM_SEEDS)]
        table, ours[dataset] = _dataset(dataset, loads)
        tables.append(table)
    shown = ", ".join(f"{count:,} {DATASETS[dataset]}" for dataset, count in counts.items())
    return PresetResult(
        constants=[
            ("requests", f"{shown}, seeds {seed} to {seed + NUM_SEEDS - 1}"),
            ("counted", "steps from the admission of the first tenth of them until all but the last are admitted"),
            *constants(),
        ],
        tables=tables,
        notes=NOTES,
        published=dict(PUBLISHED),
        ours=ours,
    )


def _dataset(dataset: str, loads: list[Load]) -> tuple[Table, dict[str, dict[str, float]]]:
    rows, ours = [], {}
    for kv, policy in POLICIES.items():
        runs = [steady_state(kv, load) for load in loads]
        batch = Spread.of([run.batch for run in runs])
        numbers = {
            "saturated": batch.mean,
            "saturated_spread": batch.off,
            "saturated_by_time": Spread.of([run.batch_by_time for run in runs]).mean,
            "saturated_requests_per_s": Spread.of([run.requests_per_s for run in runs]).mean,
            "at_rate": steady_state(kv, loads[0], RATES[dataset]).batch,
        }
        ours[kv] = {name: round(number, 2) for name, number in numbers.items()}
        published = f"{PUBLISHED[dataset][kv]:.2f}"
        rows.append([f"{policy}, {kv}", published, *(f"{number:.2f}" for number in numbers.values())])
    at_rate = f"ours, at {RATES[dataset]:g}/s"
    columns = ["policy", "published", "ours, saturated", "seeds, +-", "by time", "requests/s", at_rate]
    return Table(f"{DATASETS[dataset]}: mean number of running requests", columns, rows), ours


PRESET = Preset(
    name="vllm-fig13",
    title="Requests that run at once, OPT-13B",
    source="Kwon et al., SOSP'23, Figure 13",
    run=run,
    takes=frozenset({"workload_seed", "num_prompts"}),
)
