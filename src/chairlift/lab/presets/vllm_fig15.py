"""Figure 15 of the PagedAttention paper: KV memory saved by sharing a prompt between several outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from chairlift.clock import VirtualClock
from chairlift.events import EventSink
from chairlift.lab.presets import PresetOptions, PresetResult, Table, format_number
from chairlift.lab.presets import vllm_experiments as vllm
from chairlift.lab.presets.capacity import at_rate
from chairlift.lab.sim.simulator import make_engine_core
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams

NUM_PROMPTS: Final = {"alpaca": 2000, "sharegpt": 400}
SIZES: Final = (2, 4, 6)
OUTPUT_RATES: Final = {"alpaca": 40.0, "sharegpt": 1.5}
"""Requested outputs per second, for every number of outputs per prompt; they do not fill the KV memory."""

PUBLISHED: Final[dict[str, dict[str, list[float | None]]]] = {
    "alpaca": {"parallel_sampling": [6.09, 8.53, 9.79], "beam_search": [37.56, 53.13, 55.16]},
    "sharegpt": {"parallel_sampling": [16.2, None, 30.5], "beam_search": [44.3, None, 66.3]},
}
"""Percent of the blocks without sharing, by SIZES. For ShareGPT section 6.3 has the first and the last value."""

NOTES: Final = [
    "The number is saved / (held + saved) slots: a block in the tables of k sequences saves k - 1 blocks. It depends "
    "on the lengths, and on the rate only if memory is so short that siblings do not run together.",
    "All outputs of a prompt have the length that the histogram gives, because the data sets have no other lengths.",
    "Only full blocks of the prompt are shared, and every sequence computes at least one prompt token, so a prompt of "
    "exactly 16 tokens shares nothing. The paper's vLLM shares such a block, and a partly filled one until a sequence "
    "writes to it.",
    "The savings depend on the ratio of output and prompt length of each request, which independent draws change.",
    "This engine has no beam search; the published numbers are shown for completeness.",
]


def siblings(item: WorkloadRequest, count: int) -> list[Request]:
    """Returns `count` requests for the same prompt, of which the first is the leader."""
    leader_id = f"{item.request_id}-0"
    return [
        Request(
            f"{item.request_id}-{index}",
            list(item.prompt_token_ids),
            SamplingParams(ignore_eos=True, max_tokens=item.output_len),
            item.output_len,
            arrival_time=item.arrival,
            leader_id=leader_id if index else None,
            output_len=item.output_len,
        )
        for index in range(count)
    ]


def simulate_siblings(items: Sequence[WorkloadRequest], count: int, events: EventSink) -> None:
    """Simulates requests in order of arrival, with `count` outputs per prompt, under paging without a prefix cache."""
    clock = VirtualClock()
    core, _ = make_engine_core(vllm.sim_config("paged"), vllm.cost_model(), clock, events)
    upcoming = deque(items)
    while upcoming or core.has_work:
        if not core.has_work:
            clock.advance(max(0.0, upcoming[0].arrival - clock.now()))
        while upcoming and upcoming[0].arrival <= clock.now():
            for request in siblings(upcoming.popleft(), count):
                core.add(request)
        core.step()


def parallel_sampling(dataset: str, requests: Sequence[WorkloadRequest], count: int) -> vllm.SteadyState:
    """Simulates `count` outputs per prompt at the outputs per second of the data set, and returns the means."""
    tally = vllm.SteadyStateTally(count * len(requests))
    simulate_siblings(at_rate(requests, OUTPUT_RATES[dataset] / count), count, tally)
    return tally.result()


def run(options: PresetOptions) -> PresetResult:
    """Simulates both data sets with each number of outputs and several seeds."""
    seed = options.workload_seed or 0
    counts, shown = vllm.prompt_counts(options, NUM_PROMPTS)
    rows: list[list[str]] = []
    ours: dict[str, Any] = {}
    for dataset, count in counts.items():
        workloads = [vllm.draw_requests(dataset, seed + i, count) for i in range(vllm.NUM_SEEDS)]
        shares = [[parallel_sampling(dataset, requests, size).saved for requests in workloads] for size in SIZES]
        saved = [vllm.SeedStatistics.from_values(values) for values in shares]
        rows += _rows(dataset, saved)
        ours[dataset] = {"parallel_sampling": [round(s.mean, 2) for s in saved], "beam_search": None}
    columns = ["data set, outputs", "published, %", "ours, %", "seeds, +-", "beam search, published, %", "ours, %"]
    return PresetResult(
        constants=[
            ("prompts", f"{shown}, Poisson arrivals, seeds {seed} to {seed + vllm.NUM_SEEDS - 1}"),
            ("requested outputs", ", ".join(f"{vllm.DATASETS[d]} {rate:g}/s" for d, rate in OUTPUT_RATES.items())),
            vllm.COUNTED,
            *vllm.constants(),
        ],
        tables=[Table("KV memory saved by sharing prompts", columns, rows)],
        notes=NOTES,
        published={"sizes": list(SIZES), **PUBLISHED},
        ours={"sizes": list(SIZES), **ours},
    )


def _rows(dataset: str, saved: list[vllm.SeedStatistics]) -> list[list[str]]:
    published = PUBLISHED[dataset]
    rows = []
    for size, sampling, beam, ours in zip(
        SIZES, published["parallel_sampling"], published["beam_search"], saved, strict=True
    ):
        numbers = [format_number(sampling, 1), f"{ours.mean:.1f}", f"{ours.deviation:.1f}", format_number(beam, 1), "-"]
        rows.append([f"{vllm.DATASETS[dataset]}, {size}", *numbers])
    return rows
