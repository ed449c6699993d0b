"""Sarathi-Serve: the effect of whole prompts and of chunked prefill on the time between tokens."""

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
from chairlift.lab.presets import PresetOptions, PresetResult, Table, format_number
from chairlift.lab.presets.capacity import at_rate, highest_rate, measure, num_kv_slots
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.published_models import model_shape
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload

DEVICE: Final = Device(
    "A100-80GB-PCIe", 312e12, 1935e9, 80 * 10**9, "NVIDIA A100 datasheet, PCIe 80GB", link_bandwidth=300e9
)
"""The device of the paper's machines (Azure NC96ads v4), in which NVLink connects pairs of them."""

MAX_NUM_SEQS: Final = 128
NUM_PROMPTS: Final = 512
MAX_MEDIAN_QUEUE_TIME: Final = 2.0
"""Maximum in seconds at which a rate counts as sustained (section 5.1)."""

MIN_COMPLETION_RATIO: Final = 0.9
"""Minimum of `completion_ratio` for a sustained rate. The queue time alone shows an overload only when all seats are in
use, and the published runs were longer."""

TOLERANCE: Final = 0.05
"""The relative error of a capacity."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A length distribution with known median, 90th percentile and maximum, which is uniform between them."""

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
    """The prompt and output lengths of a data set; their sum is at most max_model_len (section 5, Table 2).

    Attributes:
        ablation_rate: requests per second in Table 4, from the scripts published with the paper.
    """

    name: str
    prompt: Quantiles
    output: Quantiles
    max_model_len: int
    ablation_rate: float

    def workload(self, seed: int, count: int, vocab_size: int) -> list[WorkloadRequest]:
        """Returns requests that arrive once per second on average."""
        return make_workload(
            seed, count, self.prompt, self.output, ArrivalProcess(1.0), vocab_size, max_model_len=self.max_model_len
        )


CHAT: Final = Dataset("openchat_sharegpt4", Quantiles(1730, 5696, 8192), Quantiles(415, 834, 1024), 8192, 1.0)
ARXIV: Final = Dataset("arxiv_summarization", Quantiles(7059, 12985, 16384), Quantiles(208, 371, 1024), 16384, 0.5)
DATASETS: Final = (CHAT, ARXIV)


@dataclass(frozen=True, slots=True)
class SarathiRun:
    """The result of a run.

    Attributes:
        ttft_p50, queue_time_p50: medians in seconds.
        itl_p99: inter-token latency in seconds; 0.0 if no request has two tokens.
        completion_ratio: as the function `completion_ratio` returns it.
    """

    ttft_p50: float
    itl_p99: float
    queue_time_p50: float
    completion_ratio: float

    def is_sustained(self, limit: float) -> bool:
        is_steady = self.queue_time_p50 <= MAX_MEDIAN_QUEUE_TIME and self.completion_ratio >= MIN_COMPLETION_RATIO
        return is_steady and self.itl_p99 <= limit


def completion_ratio(finished: Sequence[RequestMetrics]) -> float:
    """Returns finished requests per arrival, between the arrivals of the middle request and of the last one."""
    arrivals = sorted(request.arrival for request in finished)
    start, end = arrivals[len(arrivals) // 2], arrivals[-1]
    num_ended = sum(start < request.token_times[-1] <= end for request in finished)
    num_arrived = sum(start < arrival <= end for arrival in arrivals)
    return num_ended / num_arrived if num_arrived else 1.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on devices, with its published limits and results.

    Attributes:
        strict, relaxed: limits on the P99 inter-token latency in seconds (Table 3).
        over_vllm: the capacity as a multiple of vLLM's (abstract).
        over_orca: the capacity as a multiple of Orca's (section 5.1; Yi-34B, chat, strict).
    """

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
        """Seconds of a step of 32 decodes at 4096 tokens; the paper's limits are 5 and 25 times this."""
        context = 32 * 4096
        return self.cost_model.seconds(StepShape(32, 32, 32, context, context))

    def run(self, requests: Sequence[WorkloadRequest], max_model_len: int, token_budget: int) -> SarathiRun:
        config = SimConfig(
            SchedulerConfig(max_model_len, MAX_NUM_SEQS, token_budget),
            num_blocks=self.num_slots // DEFAULT_BLOCK_SIZE,
            enable_prefix_caching=False,
            model=self.model,
        )
        finished: list[RequestMetrics] = []
        metrics = measure(requests, config, self.cost_model, finished)
        assert metrics.ttft is not None, "every request has finished"
        assert metrics.queue_time is not None
        itl_p99 = 0.0 if metrics.itl is None else metrics.itl.p99
        return SarathiRun(metrics.ttft.p50, itl_p99, metrics.queue_time.p50, completion_ratio(finished))


MISTRAL: Final = Deployment(model_shape("mistral-7b"), 1, strict=0.1, relaxed=0.5, over_vllm=2.6, over_orca=None)
YI: Final = Deployment(model_shape("yi-34b"), 2, strict=0.2, relaxed=1.0, over_vllm=3.7, over_orca=4.0)
DEPLOYMENTS: Final = (MISTRAL, YI)
FALCON_GAIN: Final = 5.6
STRICT_BUDGET: Final = 512
RELAXED_BUDGET: Final = 2048

ABLATION_PROMPTS: Final = 128
ABLATION_BUDGETS: Final = (None, 2048, 1024, 512)
"""Tokens of a step; None: those of the longest request, so that no prompt is divided."""

PUBLISHED_ABLATION: Final = {
    (CHAT.name, None): (0.53, 0.68),
    (CHAT.name, 1024): (0.76, 0.14),
    (ARXIV.name, None): (3.78, 1.38),
    (ARXIV.name, 1024): (3.90, 0.17),
}
"""Median TTFT and P99 inter-token latency of Yi-34B in seconds (Table 4: hybrid-batching-only, and combined)."""

NOTES: Final = (
    "Without chunking, the token budget is as large as the longest request, so a step computes whole prompts together "
    "with the decodes. This is the paper's hybrid-batching-only, and Orca on paged memory. This scheduler has no steps "
    "of prompts only, as vLLM's are in the paper, so the published multiples over vLLM are compared with ours over "
    "whole prompts.",
    "Lengths have the published median and 90th percentile, are uniform between them, and are independent for prompt "
    "and output, because no more is known of the data sets here. The rates of the first runs are those of the scripts "
    "published with the paper, which does not name them. The scripts run chunks of 512, and the paper names 1024; its "
    "time between tokens is between ours of both.",
    "Whole prompts delay a step for longer here than published, most of all when two of them are in the same step: at "
    "these lengths and rates the simulated machine has more load.",
    "In the roofline small chunks have a low cost: weights, K and V are read again, and a layer has a fixed overhead. "
    "The paper measures up to 25 % of a prefill for chunks of 512, caused by partly filled tiles and kernels. Our "
    "chunked runs under the strict limit are faster for this reason.",
    "Whether a queue stays short over some hundred requests depends on chance: the capacities of chunked runs, which "
    "this limits, differ by up to a third between seeds, and so do the gains.",
    "Falcon-180B ran as two pipeline stages across nodes. Most of its gain comes from pipeline bubbles, and the cost "
    "model has no pipeline.",
)


def ablation(seed: int, count: int) -> dict[tuple[str, int | None], SarathiRun]:
    """Returns runs of Yi-34B by data set and token budget."""
    found = {}
    for dataset in DATASETS:
        requests = at_rate(dataset.workload(seed, count, YI.model.vocab_size), dataset.ablation_rate)
        for budget in ABLATION_BUDGETS:
            found[dataset.name, budget] = YI.run(requests, dataset.max_model_len, budget or dataset.max_model_len)
    return found


@dataclass(frozen=True, slots=True)
class SustainedCapacity:
    """The highest sustained request rates with whole prompts and with chunked prefill.

    Attributes:
        slo: "strict" or "relaxed".
        limit: the maximum P99 inter-token latency in seconds.
        whole, chunked: requests per second; 0.0 if every simulated rate is too high, infinity if none is.
    """

    deployment: Deployment
    dataset: Dataset
    slo: str
    limit: float
    token_budget: int
    whole: float
    chunked: float

    @property
    def gain(self) -> float | None:
        """chunked / whole; None if whole prompts sustain no rate or every rate."""
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
    """Returns the rounded value, or None for infinity, which JSON does not have."""
    return round(value, 3) if math.isfinite(value) else None


def capacities(deployment: Deployment, dataset: Dataset, seed: int, count: int) -> Iterator[SustainedCapacity]:
    """Yields the capacities under the strict and under the relaxed limit."""
    requests = dataset.workload(seed, count, deployment.model.vocab_size)

    @cache
    def run_at(rate: float, token_budget: int) -> SarathiRun:
        return deployment.run(at_rate(requests, rate), dataset.max_model_len, token_budget)

    def highest(limit: float, token_budget: int) -> float:
        return highest_rate(lambda rate: run_at(rate, token_budget).is_sustained(limit), 1.0, TOLERANCE)

    slos = (("strict", deployment.strict, STRICT_BUDGET), ("relaxed", deployment.relaxed, RELAXED_BUDGET))
    for slo, limit, token_budget in slos:
        whole, chunked = highest(limit, dataset.max_model_len), highest(limit, token_budget)
        yield SustainedCapacity(deployment, dataset, slo, limit, token_budget, whole, chunked)


def run(options: PresetOptions) -> PresetResult:
    """Simulates inter-token latencies by token budget, then the rates that two deployments sustain."""
    seed = options.workload_seed or 0
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
        notes=NOTES,
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
        ("requests", f"{count} per run for capacities, seed {seed}; Poisson arrivals, the same draws at every rate"),
        ("kv", f"paged, blocks of {DEFAULT_BLOCK_SIZE}, no prefix cache; {MAX_NUM_SEQS} seats"),
        (
            "sustained",
            f"P99 ITL within the limit, median queue time within {MAX_MEDIAN_QUEUE_TIME:g} s, and at least "
            f"{MIN_COMPLETION_RATIO:g} finished requests per arrival in the later half; tolerance {TOLERANCE:.0%}",
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


def _ablation_table(runs: dict[tuple[str, int | None], SarathiRun]) -> Table:
    rows = []
    for (dataset, budget), measured in runs.items():
        ttft, itl = PUBLISHED_ABLATION.get((dataset, budget), (None, None))
        rows.append(
            [
                f"{dataset}, {'whole prompts' if budget is None else f'chunks of at most {budget}'}",
                format_number(ttft, 2),
                f"{measured.ttft_p50:.2f}",
                format_number(itl, 2),
                f"{measured.itl_p99:.2f}",
            ]
        )
    columns = ["Yi-34B on two devices", "TTFT p50 publ.", "ours", "ITL p99 publ.", "ours"]
    return Table("TTFT and inter-token latency in seconds", columns, rows)


def _capacity_table(found: list[SustainedCapacity]) -> Table:
    rows = []
    for capacity in found:
        name = f"{capacity.deployment.model.name}, {capacity.dataset.name}"
        cells = [f"{capacity.slo}, {capacity.limit:g} s", f"{capacity.token_budget}"]
        rates = [f"{capacity.whole:.2f}", f"{capacity.chunked:.2f}"]
        rows.append([name, *cells, *rates, _times(capacity.gain)])
    columns = ["model, data set", "limit", "token budget", "whole prompts", "chunked", "gain"]
    return Table("Sustained requests per second (ours)", columns, rows)


def _gains_table(found: list[SustainedCapacity]) -> Table:
    """Returns the published gains beside the range of ours."""
    rows = []
    for deployment in DEPLOYMENTS:
        gains = [c.gain for c in found if c.deployment is deployment and c.gain is not None]
        ours = f"{_times(min(gains))} to {_times(max(gains))}" if gains else "-"
        rows.append([deployment.model.name, _times(deployment.over_vllm), _times(deployment.over_orca), ours])
    rows.append(["falcon-180b", _times(FALCON_GAIN), "-", "-"])
    columns = ["model", "publ. over vLLM, at most", "publ. over Orca, at most", "ours, over whole prompts"]
    return Table("Capacity gained", columns, rows)


def _times(gain: float | None) -> str:
    return format_number(gain, 1, "x")
