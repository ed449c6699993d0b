"""Sarathi-Serve: what whole prompts do to the time between tokens, and chunks of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from chairlift.config import DEFAULT_BLOCK_SIZE, SchedulerConfig
from chairlift.engine.startup.model_shape import ModelShape
from chairlift.lab.metrics.percentile import percentile
from chairlift.lab.metrics.requests import RequestMetrics
from chairlift.lab.presets import Preset, PresetOptions, PresetResult, Table
from chairlift.lab.presets.capacity import at_rate, highest_rate, measure, num_kv_slots
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.published_models import model_shape
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.workload.arrivals import PoissonArrivals
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload

DEVICE: Final = Device(
    "A100-80GB-PCIe", 312e12, 1935e9, 80 * 10**9, "NVIDIA A100 datasheet, PCIe 80GB", link_bandwidth=300e9
)
"""As in the paper's machines (Azure NC96ads v4), which join them in pairs by NVLink."""

MAX_NUM_SEQS: Final = 128
NUM_PROMPTS: Final = 512
SEED: Final = 0
MAX_MEDIAN_QUEUE_TIME: Final = 2.0
"""Seconds; above, a rate does not count as sustained (section 5.1)."""

MIN_KEPT_UP: Final = 0.9
"""While the later half of the requests arrives, so many must end for each that comes. The queue time alone shows an
overload only after all seats are taken, and the published runs were longer."""

TOLERANCE: Final = 0.05
"""Of a capacity, as a share of it."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Lengths of which the median, the 90th percentile and the longest are known: any between two of these alike."""

    median: int
    p90: int
    longest: int

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        lens = np.interp(rng.random(count), [0.0, 0.5, 0.9, 1.0], [1, self.median, self.p90, self.longest])
        return [round(length) for length in lens.tolist()]

    def __str__(self) -> str:
        return f"median {self.median:,}, p90 {self.p90:,}, at most {self.longest:,}"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Lengths of a data set, whose longer pairs were left out (section 5, Table 2).

    Attributes:
        ablation_rate: requests a second in Table 4, from the scripts published with the paper.
    """

    name: str
    prompt: Quantiles
    output: Quantiles
    max_model_len: int
    ablation_rate: float

    def workload(self, seed: int, count: int, vocab_size: int) -> list[WorkloadRequest]:
        """Requests that arrive once a second on average."""
        return make_workload(
            seed, count, self.prompt, self.output, PoissonArrivals(1.0), vocab_size, max_model_len=self.max_model_len
        )


CHAT: Final = Dataset("openchat_sharegpt4", Quantiles(1730, 5696, 8192), Quantiles(415, 834, 1024), 8192, 1.0)
ARXIV: Final = Dataset("arxiv_summarization", Quantiles(7059, 12985, 16384), Quantiles(208, 371, 1024), 16384, 0.5)
DATASETS: Final = (CHAT, ARXIV)


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds: median TTFT, P99 time between tokens (0.0 if no request has two), median queue time; and what
    `share_kept_up` says."""

    ttft_p50: float
    itl_p99: float
    queue_time_p50: float
    kept_up: float

    def is_sustained(self, limit: float) -> bool:
        is_steady = self.queue_time_p50 <= MAX_MEDIAN_QUEUE_TIME and self.kept_up >= MIN_KEPT_UP
        return is_steady and self.itl_p99 <= limit


def share_kept_up(answered: Sequence[RequestMetrics]) -> float:
    """Requests that ended for each that came, from the arrival of the one in the middle to that of the last."""
    arrivals = sorted(request.arrival for request in answered)
    start, end = arrivals[len(arrivals) // 2], arrivals[-1]
    num_ended = sum(start < request.token_times[-1] <= end for request in answered)
    num_arrived = sum(start < arrival <= end for arrival in arrivals)
    return num_ended / num_arrived if num_arrived else 1.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on devices, with its limits on the P99 time between tokens in seconds (Table 3), and the published
    multiples of vLLM's capacity (abstract) and of Orca's (section 5.1; Yi-34B, chat, strict)."""

    model: ModelShape
    tensor_parallel_size: int
    strict: float
    relaxed: float
    over_vllm: float
    over_orca: float | None

    @property
    def cost_model(self) -> Roofline:
        return Roofline(self.model, DEVICE, self.tensor_parallel_size)

    @property
    def num_slots(self) -> int:
        return num_kv_slots(self.model, DEVICE, self.tensor_parallel_size)

    @property
    def decode_seconds(self) -> float:
        """Of a step of 32 decodes at 4096 tokens; the paper's limits are 5 and 25 of these."""
        context = 32 * 4096
        return self.cost_model.seconds(StepShape(32, 32, 32, context, context))

    def run(self, requests: Sequence[WorkloadRequest], max_model_len: int, token_budget: int) -> Run:
        config = SimConfig(
            SchedulerConfig(max_model_len, MAX_NUM_SEQS, token_budget),
            num_blocks=self.num_slots // DEFAULT_BLOCK_SIZE,
            enable_prefix_caching=False,
            model=self.model,
        )
        answered: list[RequestMetrics] = []
        metrics = measure(requests, config, self.cost_model, answered)
        assert metrics.ttft is not None, "every request was answered"
        assert metrics.queue_time is not None
        itl_p99 = 0.0 if metrics.itl is None else metrics.itl.p99
        return Run(metrics.ttft.p50, itl_p99, metrics.queue_time.p50, share_kept_up(answered))


MISTRAL: Final = Deployment(model_shape("mistral-7b"), 1, strict=0.1, relaxed=0.5, over_vllm=2.6, over_orca=None)
YI: Final = Deployment(model_shape("yi-34b"), 2, strict=0.2, relaxed=1.0, over_vllm=3.7, over_orca=4.0)
DEPLOYMENTS: Final = (MISTRAL, YI)
FALCON_GAIN: Final = 5.6
STRICT_BUDGET: Final = 512
RELAXED_BUDGET: Final = 2048

ABLATION_PROMPTS: Final = 128
ABLATION_BUDGETS: Final = (None, 2048, 1024, 512)
"""Tokens of a step; None: as many as the longest request has, so that no prompt is cut."""

PUBLISHED_ABLATION: Final = {
    (CHAT.name, None): (0.53, 0.68),
    (CHAT.name, 1024): (0.76, 0.14),
    (ARXIV.name, None): (3.78, 1.38),
    (ARXIV.name, 1024): (3.90, 0.17),
}
"""Median TTFT and P99 time between tokens, in seconds, of Yi-34B (Table 4: hybrid-batching-only, and combined)."""

NOTES: Final = (
    "Without chunking means a token budget as large as the longest request: a step takes whole prompts along with the "
    "decodes. That is the paper's hybrid-batching-only, and Orca on paged memory. vLLM's steps of nothing but prompts "
    "are no way of this scheduler, so beside the published multiples over vLLM stand ours over whole prompts.",
    "Lengths follow the published median and 90th percentile, evenly between two of these, prompt and output "
    "independent; no more is known of the data sets here. Rates of the first runs are those of the scripts published "
    "with the paper, which does not state them. The scripts run chunks of 512, the paper says 1024; its time "
    "between tokens lies between ours of both.",
    "Whole prompts stall a step for longer here than published, most of all where two wait for the same step: at these "
    "lengths and rates the simulated machine is busier.",
    "In the roofline small chunks cost little: weights, K and V read again, and a layer's fixed overhead. The paper "
    "measures up to 25 % of a prefill for chunks of 512, by tiles and kernels that fill badly. This flatters our "
    "chunked runs under the strict limit.",
    "Whether a queue stays short over some hundred requests is partly chance: capacities of chunked runs, which end "
    "there, differ by up to a third between seeds, and gains with them.",
    "Falcon-180B ran as two pipeline stages across nodes. Most of its gain comes from pipeline bubbles, and the cost "
    "model has no pipeline.",
)


def ablation(seed: int, count: int) -> dict[tuple[str, int | None], Run]:
    """Runs of Yi-34B by data set and token budget."""
    found = {}
    for dataset in DATASETS:
        requests = at_rate(dataset.workload(seed, count, YI.model.vocab_size), dataset.ablation_rate)
        for budget in ABLATION_BUDGETS:
            found[dataset.name, budget] = YI.run(requests, dataset.max_model_len, budget or dataset.max_model_len)
    return found


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests a second that can be sustained, of whole prompts and in chunks; 0.0 or infinity where every rate that
    was tried is too high, or none is."""

    deployment: Deployment
    dataset: Dataset
    slo: str
    limit: float
    token_budget: int
    whole: float
    chunked: float

    @property
    def gain(self) -> float | None:
        """None if whole prompts sustain no rate, or every one."""
        return self.chunked / self.whole if 0 < self.whole < math.inf else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.deployment.model.name,
            "dataset": self.dataset.name,
            "slo": self.slo,
            "itl_p99_limit": self.limit,
            "max_num_batched_tokens": self.token_budget,
            "requests_per_s": {"whole": _finite(self.whole), "chunked": _finite(self.chunked)},
            "gain": self.gain and _finite(self.gain),
        }


def _finite(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return round(value, 3) if math.isfinite(value) else None


def capacities(deployment: Deployment, dataset: Dataset, seed: int, count: int) -> Iterator[Capacity]:
    """Under the strict and the relaxed limit."""
    requests = dataset.workload(seed, count, deployment.model.vocab_size)

    @cache
    def run_at(rate: float, token_budget: int) -> Run:
        return deployment.run(at_rate(requests, rate), dataset.max_model_len, token_budget)

    def highest(limit: float, token_budget: int) -> float:
        return highest_rate(lambda rate: run_at(rate, token_budget).is_sustained(limit), 1.0, TOLERANCE)

    slos = (("strict", deployment.strict, STRICT_BUDGET), ("relaxed", deployment.relaxed, RELAXED_BUDGET))
    for slo, limit, token_budget in slos:
        whole, chunked = highest(limit, dataset.max_model_len), highest(limit, token_budget)
        yield Capacity(deployment, dataset, slo, limit, token_budget, whole, chunked)


def run(options: PresetOptions) -> PresetResult:
    """Time between tokens by token budget, then the rates that two deployments sustain."""
    seed = SEED if options.workload_seed is None else options.workload_seed
    count = options.num_prompts or NUM_PROMPTS
    runs = ablation(seed, options.num_prompts or ABLATION_PROMPTS)
    found = [
        capacity
        for deployment in DEPLOYMENTS
        for dataset in DATASETS
        for capacity in capacities(deployment, dataset, seed, count)
    ]
    return PresetResult(
        constants=_constants(seed, count),
        tables=[_lengths_table(seed, count), _ablation_table(runs), _capacity_table(found), _gains_table(found)],
        notes=list(NOTES),
        published={
            "ablation": [_ablation_entry(key, *times) for key, times in PUBLISHED_ABLATION.items()],
            "gain_over_vllm": {d.model.name: d.over_vllm for d in DEPLOYMENTS} | {"falcon-180b": FALCON_GAIN},
            "gain_over_orca": {YI.model.name: YI.over_orca},
        },
        ours={
            "ablation": [_ablation_entry(key, r.ttft_p50, r.itl_p99) for key, r in runs.items()],
            "capacity": [capacity.to_dict() for capacity in found],
        },
    )


def _ablation_entry(key: tuple[str, int | None], ttft_p50: float, p99: float) -> dict[str, Any]:
    dataset, budget = key
    return {
        "dataset": dataset,
        "max_num_batched_tokens": budget,
        "ttft_p50": round(ttft_p50, 4),
        "itl_p99": round(p99, 4),
    }


def _constants(seed: int, count: int) -> list[tuple[str, str]]:
    constants = [
        ("requests", f"{count} a run for capacities, seed {seed}; Poisson arrivals, the same draws at every rate"),
        ("kv", f"paged, blocks of {DEFAULT_BLOCK_SIZE}, no prefix cache; {MAX_NUM_SEQS} seats"),
        (
            "sustained",
            f"P99 time between tokens within the limit, median queue time within {MAX_MEDIAN_QUEUE_TIME:g} s, and "
            f"{MIN_KEPT_UP:g} requests end for each that comes in the later half; to {TOLERANCE:.0%}",
        ),
    ]
    for deployment in DEPLOYMENTS:
        step = deployment.decode_seconds
        name = deployment.model.name
        constants += [
            (f"{name}: slots", f"{deployment.num_slots:,}"),
            (
                f"{name}: limits",
                f"{deployment.strict:g} s and {deployment.relaxed:g} s (published as 5 and 25 steps of 32 decodes at "
                f"4096 tokens; ours are {5 * step:.2f} s and {25 * step:.2f} s)",
            ),
        ]
    described = [deployment.cost_model.constants() for deployment in DEPLOYMENTS]
    return constants + [entry for entry in described[0] if entry not in described[1]] + described[1]


def _lengths_table(seed: int, count: int) -> Table:
    rows = []
    for dataset in DATASETS:
        requests = dataset.workload(seed, count, YI.model.vocab_size)
        for what, known, lens in (
            ("prompt", dataset.prompt, [len(r.prompt_token_ids) for r in requests]),
            ("output", dataset.output, [r.output_len for r in requests]),
        ):
            ours = [f"{percentile(lens, percent):,.0f}" for percent in (50, 90)]
            rows.append([f"{dataset.name}, {what}", f"{known.median:,}", ours[0], f"{known.p90:,}", ours[1]])
    columns = ["tokens", "median publ.", "ours", "p90 publ.", "ours"]
    return Table("Lengths as drawn", columns, rows)


def _ablation_table(runs: dict[tuple[str, int | None], Run]) -> Table:
    rows = []
    for (dataset, budget), measured in runs.items():
        ttft, tbt = PUBLISHED_ABLATION.get((dataset, budget), (None, None))
        rows.append(
            [
                f"{dataset}, {'whole prompts' if budget is None else f'chunks of at most {budget}'}",
                "-" if ttft is None else f"{ttft:.2f}",
                f"{measured.ttft_p50:.2f}",
                "-" if tbt is None else f"{tbt:.2f}",
                f"{measured.itl_p99:.2f}",
            ]
        )
    columns = ["Yi-34B on two devices", "TTFT p50 publ.", "ours", "ITL p99 publ.", "ours"]
    return Table("TTFT and time between tokens, in seconds", columns, rows)


def _capacity_table(found: list[Capacity]) -> Table:
    rows = []
    for capacity in found:
        name = f"{capacity.deployment.model.name}, {capacity.dataset.name}"
        cells = [f"{capacity.slo}, {capacity.limit:g} s", f"{capacity.token_budget}"]
        rates = [f"{capacity.whole:.2f}", f"{capacity.chunked:.2f}"]
        rows.append([name, *cells, *rates, _times(capacity.gain)])
    columns = ["model, data set", "limit", "token budget", "whole prompts", "chunked", "gain"]
    return Table("Requests a second that are sustained (ours)", columns, rows)


def _gains_table(found: list[Capacity]) -> Table:
    """The published headline beside our span."""
    rows = []
    for deployment in DEPLOYMENTS:
        gains = [c.gain for c in found if c.deployment is deployment and c.gain is not None]
        ours = f"{_times(min(gains))} to {_times(max(gains))}" if gains else "-"
        rows.append([deployment.model.name, _times(deployment.over_vllm), _times(deployment.over_orca), ours])
    rows.append(["falcon-180b", _times(FALCON_GAIN), "-", "-"])
    columns = ["model", "publ. over vLLM, at most", "publ. over Orca, at most", "ours, over whole prompts"]
    return Table("Capacity gained", columns, rows)


def _times(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.1f}x"


PRESET: Final = Preset(
    name="sarathi",
    title="Chunked prefills against whole prompts",
    source="Agrawal et al., OSDI'24, Tables 2 to 4 and Figure 10",
    run=run,
    takes=frozenset({"workload_seed", "num_prompts"}),
)
