"""Figure 15 of the PagedAttention paper: KV memory saved by sharing a prompt among several outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from chairlift.clock import VirtualClock
from chairlift.core.baselines.selection import make_kv_cache_manager, make_scheduler
from chairlift.core.engine_core import EngineCore
from chairlift.events import EventSink
from chairlift.lab.presets import Preset, PresetOptions, PresetResult, Table
from chairlift.lab.presets.vllm_setting import DATASETS, Load, constants, cost_model, sim_config
from chairlift.lab.presets.vllm_steady import NUM_SEEDS, Spread, Steady, SteadyTally
from chairlift.lab.sim.executor import SimExecutor
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams

NUM_PROMPTS: Final = {"alpaca": 2000, "sharegpt": 400}
SIZES: Final = (2, 4, 6)
OUTPUT_RATES: Final = {"alpaca": 40.0, "sharegpt": 1.5}
"""Outputs that are asked for in a second, however many share a prompt: well below what fills the KV memory."""

PUBLISHED: Final[dict[str, dict[str, list[float | None]]]] = {
    "alpaca": {"parallel_sampling": [6.09, 8.53, 9.79], "beam_search": [37.56, 53.13, 55.16]},
    "sharegpt": {"parallel_sampling": [16.2, None, 30.5], "beam_search": [44.3, None, 66.3]},
}
"""Percent of the blocks that there would be without sharing, by SIZES. Of ShareGPT section 6.3 gives the two ends."""

NOTES: Final = [
    "Saved over held and saved, in slots: a block that k sequences name saves k - 1. It follows from the "
    "lengths, and from the rate only where memory is so short that siblings run apart.",
    "All outputs to a prompt are as long as the one that the histogram gives: the data sets have no other lengths.",
    "Only full blocks of the prompt are shared, and everybody computes at least one prompt token, so a prompt of "
    "exactly 16 tokens shares nothing. The paper's vLLM shares such a block, and a half-filled one until somebody "
    "writes into it.",
    "What is saved depends on how long outputs are beside their prompts, pair by pair; independent draws lose that.",
    "There is no beam search in this engine: what is published of it stands here for completeness.",
]


def siblings(item: WorkloadRequest, count: int) -> list[Request]:
    """`count` requests for the same prompt; the first one leads."""
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
    """Requests in order of arrival, each prompt with `count` outputs, under paging without a prefix cache."""
    config, clock = sim_config("paged"), VirtualClock()
    manager = make_kv_cache_manager(
        config.kv,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=config.scheduler.max_model_len,
        enable_prefix_caching=config.has_prefix_cache,
    )
    core = EngineCore(make_scheduler(config.scheduler, manager, events), SimExecutor(cost_model(), clock), clock)
    coming = deque(items)
    while coming or core.has_work:
        if not core.has_work:
            clock.advance(max(0.0, coming[0].arrival - clock.now()))
        while coming and coming[0].arrival <= clock.now():
            for request in siblings(coming.popleft(), count):
                core.add(request)
        core.step()


def parallel_sampling(dataset: str, load: Load, count: int) -> Steady:
    tally = SteadyTally(count * len(load.pairs))
    simulate_siblings(load.at_rate(OUTPUT_RATES[dataset] / count), count, tally)
    return tally.result()


def run(options: PresetOptions) -> PresetResult:
    """Both data sets with each number of outputs, several seeds."""
    seed = options.workload_seed or 0
    counts = {dataset: options.num_prompts or count for dataset, count in NUM_PROMPTS.items()}
    rows: list[list[str]] = []
    ours: dict[str, Any] = {}
    for dataset, count in counts.items():
        loads = [Load.draw(dataset, seed + i, count) for i in range(NUM_SEEDS)]
        saved = [Spread.of([parallel_sampling(dataset, load, size).saved for load in loads]) for size in SIZES]
        rows += _rows(dataset, saved)
        ours[dataset] = {"parallel_sampling": [round(s.mean, 2) for s in saved], "beam_search": None}
    shown = ", ".join(f"{count:,} {DATASETS[dataset]}" for dataset, count in counts.items())
    columns = ["data set, outputs", "published, %", "ours, %", "seeds, +-", "beam search, published, %", "ours, %"]
    return PresetResult(
        constants=[
            ("prompts", f"{shown}, Poisson arrivals, seeds {seed} to {seed + NUM_SEEDS - 1}"),
            ("outputs asked for", ", ".join(f"{DATASETS[d]} {rate:g}/s" for d, rate in OUTPUT_RATES.items())),
            ("counted", "steps from the admission of the first tenth of them until all but the last are admitted"),
            *constants(),
        ],
        tables=[Table("KV memory saved by sharing prompts", columns, rows)],
        notes=NOTES,
        published={"sizes": list(SIZES), **PUBLISHED},
        ours={"sizes": list(SIZES), **ours},
    )


def _rows(dataset: str, saved: list[Spread]) -> list[list[str]]:
    published = PUBLISHED[dataset]
    rows = []
    for size, sampling, beam, ours in zip(
        SIZES, published["parallel_sampling"], published["beam_search"], saved, strict=True
    ):
        numbers = [_shown(sampling), f"{ours.mean:.1f}", f"{ours.off:.1f}", _shown(beam), "-"]
        rows.append([f"{DATASETS[dataset]}, {size}", *numbers])
    return rows


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.1f}"


PRESET = Preset(
    name="vllm-fig15",
    title="KV memory saved by parallel sampling, OPT-13B",
    source="Kwon et al., SOSP'23, Figure 15 and section 6.3",
    run=run,
    takes=frozenset({"workload_seed", "num_prompts"}),
)
