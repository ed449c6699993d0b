"""Orca compared with FasterTransformer: requests per second at the same latency per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from chairlift.config import SchedulerConfig
from chairlift.lab.metrics.percentile import percentile
from chairlift.lab.metrics.requests import RequestMetrics
from chairlift.lab.presets import PresetOptions, PresetResult, Table, format_number
from chairlift.lab.presets.capacity import at_rate, highest_rate, measure, num_kv_slots
from chairlift.lab.sim.devices import DEVICES
from chairlift.lab.sim.published_models import model_shape
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import UniformLengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload

MODEL: Final = model_shape("gpt3-175b")
DEVICE: Final = DEVICES["A100-40GB"]
NUM_DEVICES: Final = 16
TENSOR_PARALLEL_SIZE: Final = 8
"""There are two stages of eight devices. A step passes through both in order, as 96 layers on eight devices."""

PROMPT: Final = UniformLengths(32, 512)
OUTPUT: Final = UniformLengths(1, 128)
NUM_PROMPTS: Final = 500
MAX_MODEL_LEN: Final = 2048
RATES: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

LATENCY: Final = 0.190
"""Seconds per token: twice the execution time of Orca's engine per token, with 128 prompt and 32 output tokens."""

PUBLISHED_ORCA: Final = 6.81
PUBLISHED_FASTERTRANSFORMER: Final = 0.185
PUBLISHED_MULTIPLE: Final = 36.9

RequestTransform = Callable[[Sequence[WorkloadRequest]], list[WorkloadRequest]]


def token_by_token(requests: Sequence[WorkloadRequest], batch_size: int = 8) -> list[WorkloadRequest]:
    """Returns requests with the steps of FasterTransformer for prompts of different lengths (Yu et al., section 6.2).

    Its first step computes all prompts of a batch up to the length of the shortest, and the rest of each prompt one
    token per step. Batches consist of consecutive requests, as with a full queue.
    """
    transformed = []
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        shortest = min(len(r.prompt_token_ids) for r in batch)
        for r in batch:
            rest = len(r.prompt_token_ids) - shortest
            prompt = r.prompt_token_ids[:shortest]
            transformed.append(replace(r, prompt_token_ids=prompt, output_len=r.output_len + rest))
    return transformed


@dataclass(frozen=True, slots=True)
class OrcaSystem:
    """A compared system: static batching with `--kv max`, as in FasterTransformer, or continuous with `--kv exact`.

    Attributes:
        batch_size: maximum number of requests in a batch.
        transform: applied to the requests before the simulation.
    """

    name: str
    is_static: bool
    batch_size: int
    transform: RequestTransform = list

    def config(self) -> SimConfig:
        """Returns an engine without chunked prefill: the token budget is a full batch of the longest prompts."""
        limits = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self.batch_size,
            max_num_batched_tokens=self.batch_size * MAX_MODEL_LEN,
            batching="static" if self.is_static else "continuous",
            static_batch_size=self.batch_size,
        )
        return SimConfig(
            limits,
            num_blocks=num_kv_slots(MODEL, DEVICE, NUM_DEVICES),
            block_size=1,
            kv="max" if self.is_static else "exact",
            kv_arena="first-fit",
            model=MODEL,
        )


ORCA: Final = OrcaSystem("Orca, 128 at most", False, 128)
STATIC: Final = OrcaSystem("static, 8", True, 8)
SINGLE: Final = OrcaSystem("static, 1", True, 1)
ORCA_32: Final = OrcaSystem("Orca, 32 at most", False, 32)
ORCA_8: Final = OrcaSystem("Orca, 8 at most", False, 8)
SYSTEMS: Final = (ORCA, ORCA_32, ORCA_8, STATIC, SINGLE)
TOKEN_BY_TOKEN: Final = OrcaSystem("static, 8, prompts beyond the shortest token by token", True, 8, token_by_token)
QUEUED: Final = (ORCA, STATIC, SINGLE, TOKEN_BY_TOKEN)
"""The systems that are compared with a full queue."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """The result of a run.

    Attributes:
        requests_per_s: finished requests per second.
        latency: median normalized latency (E2E latency per output token) in seconds.
    """

    requests_per_s: float
    latency: float


RateSweep = Callable[[float], LoadPoint]


def cost_model() -> Roofline:
    return Roofline(MODEL, DEVICE, TENSOR_PARALLEL_SIZE)


def run_system(system: OrcaSystem, requests: Sequence[WorkloadRequest]) -> LoadPoint:
    """Simulates a system; latencies are per output token of the requests before their transformation."""
    finished: list[RequestMetrics] = []
    metrics = measure(system.transform(requests), system.config(), cost_model(), finished)
    output_lens = {r.request_id: r.output_len for r in requests}
    latencies = [r.e2e_latency / output_lens[r.request_id] for r in finished if r.e2e_latency is not None]
    return LoadPoint(metrics.requests_per_s, percentile(latencies, 50))


def single_request_latency() -> float:
    """Returns the seconds per token of one request of 128 prompt and 32 output tokens, the paper's microbenchmark."""
    return run_system(ORCA, [WorkloadRequest("alone", 0.0, [0] * 128, 32)]).latency


def workload(seed: int, count: int) -> list[WorkloadRequest]:
    """Returns requests that arrive once per second on average."""
    return make_workload(seed, count, PROMPT, OUTPUT, ArrivalProcess(1.0), MODEL.vocab_size)


def rate_sweep(system: OrcaSystem, requests: Sequence[WorkloadRequest]) -> RateSweep:
    """Returns the function that simulates a system at a request rate. It simulates each rate once."""
    return cache(lambda rate: run_system(system, at_rate(requests, rate)))


def throughput_at(latency: float, sweep: RateSweep) -> float:
    """Returns the finished requests per second at the highest rate that keeps the median normalized latency.

    0.0 if no rate does, which can happen with few requests.
    """
    rate = highest_rate(lambda rate: sweep(rate).latency <= latency, start=1.0)
    return sweep(rate).requests_per_s if rate else 0.0


def run(options: PresetOptions) -> PresetResult:
    """Simulates five systems by rate, and four with a full queue; compares throughput at two latencies."""
    seed = options.workload_seed or 0
    requests = workload(seed, options.num_prompts or NUM_PROMPTS)
    sweeps = {system.name: rate_sweep(system, requests) for system in SYSTEMS}
    curves = {name: {rate: sweep(rate) for rate in RATES} for name, sweep in sweeps.items()}
    limits = (LATENCY, 2 * single_request_latency())
    at = {limit: {name: throughput_at(limit, sweep) for name, sweep in sweeps.items()} for limit in limits}
    burst = [replace(request, arrival=0.0) for request in requests]
    queued = {system.name: run_system(system, burst).requests_per_s for system in QUEUED}
    return PresetResult(
        constants=_constants(seed, len(requests), limits[1] / 2),
        tables=[_curves_table(curves), _throughput_table(at), _queued_table(requests, queued)],
        notes=NOTES,
        published={
            "normalized_latency_p50": LATENCY,
            "requests_per_s": {"orca": PUBLISHED_ORCA, "fastertransformer": PUBLISHED_FASTERTRANSFORMER},
            "multiple": PUBLISHED_MULTIPLE,
        },
        ours={
            "curves": {name: [_point_entry(rate, p) for rate, p in curve.items()] for name, curve in curves.items()},
            "at_published_latency": _latency_limit_entry(limits[0], at[limits[0]]),
            "at_twice_alone": _latency_limit_entry(limits[1], at[limits[1]]),
            "full_queue_requests_per_s": {name: round(rate, 3) for name, rate in queued.items()},
        },
    )


NOTES: Final = (
    "The published 190 ms is twice the time per token of a single batch in the paper's engine. The roofline is faster, "
    "so all our systems have more slack at 190 ms, static batching most of all. The last column uses twice the time of "
    "the roofline, which is the same rule.",
    "FasterTransformer is replaced by static batching with reservations of max_model_len. The paper found batches of 1 "
    "and of 8 best for it. Our batches of 8 are faster than the paper's: they pad prompts to the longest and compute "
    "them in one step. FasterTransformer's first step computed all prompts up to the length of the shortest, and the "
    "rest of each one token per step; the last row of the last table does this, and is hardly better than a batch of "
    "1. So the published multiple is compared with ours over the batch of 1.",
    "In any static batch a finished member waits for the longest one, and a new request waits for the whole batch. "
    "This alone explains the multiple over static batches of 8.",
    "The two stages of eight devices work one after the other here. Orca computes different batches on both at the "
    "same time, for up to twice the throughput, which the cost model does not include; FasterTransformer was fastest "
    "without that.",
    "In the paper the engine is up to 47 % faster than FasterTransformer on this model; all systems have the same "
    "kernels here.",
)


def _multiples(rates: dict[str, float]) -> dict[str, float | None]:
    """Returns Orca's throughput as a multiple of each static system's; None if that is 0."""
    orca = rates[ORCA.name]
    return {s.name: round(orca / rates[s.name], 2) if rates[s.name] else None for s in (SINGLE, STATIC)}


def _latency_limit_entry(limit: float, rates: dict[str, float]) -> dict[str, Any]:
    return {
        "normalized_latency_p50": round(limit, 4),
        "requests_per_s": {name: round(rate, 3) for name, rate in rates.items()},
        "multiples": _multiples(rates),
    }


def _point_entry(rate: float, point: LoadPoint) -> dict[str, float]:
    return {
        "request_rate": rate,
        "requests_per_s": round(point.requests_per_s, 3),
        "normalized_latency_p50": round(point.latency, 4),
    }


def _constants(seed: int, count: int, single_seconds: float) -> list[tuple[str, str]]:
    return [
        ("workload", f"{count} requests, prompt {PROMPT}, output {OUTPUT}, Poisson arrivals, seed {seed}"),
        ("Orca", "continuous, exact: prompt and output reserved at admission; no chunked prefill"),
        ("static", f"max: {MAX_MODEL_LEN} slots per request"),
        ("kv memory", f"{num_kv_slots(MODEL, DEVICE, NUM_DEVICES):,} slots, block_size 1, arena first-fit"),
        ("devices", f"{NUM_DEVICES}, as two stages of {TENSOR_PARALLEL_SIZE} that work one after the other"),
        ("single request", f"{single_seconds * 1e3:.1f} ms per token (128 prompt and 32 output tokens)"),
        *cost_model().constants(),
    ]


def _curves_table(curves: dict[str, dict[float, LoadPoint]]) -> Table:
    rows = [[name, *(f"{p.latency * 1e3:,.0f}" for p in curve.values())] for name, curve in curves.items()]
    columns = ["system", *(f"{rate:g}/s" for rate in RATES)]
    return Table("Median E2E latency per output token in ms, by request rate (ours)", columns, rows)


def _throughput_table(at: dict[float, dict[str, float]]) -> Table:
    published = {ORCA.name: str(PUBLISHED_ORCA), SINGLE.name: str(PUBLISHED_FASTERTRANSFORMER)}
    rows = [[s.name, published.get(s.name, "-"), *(f"{rates[s.name]:.2f}" for rates in at.values())] for s in SYSTEMS]
    for base in (SINGLE, STATIC):
        multiple = f"{PUBLISHED_MULTIPLE}x" if base is SINGLE else "-"
        multiples = [_multiples(rates)[base.name] for rates in at.values()]
        ours = [format_number(value, 1, "x") for value in multiples]
        rows.append([f"{ORCA.name}, over {base.name}", multiple, *ours])
    limits = [f"ours at {limit * 1e3:.0f} ms" for limit in at]
    columns = ["system", f"published at {LATENCY * 1e3:.0f} ms", *limits]
    return Table("Requests per second at a median E2E latency per output token", columns, rows)


def _queued_table(requests: Sequence[WorkloadRequest], queued: dict[str, float]) -> Table:
    rows = []
    for system in QUEUED:
        lens = [r.output_len for r in system.transform(requests)]
        size = system.batch_size
        steps = sum(max(lens[start : start + size]) for start in range(0, len(lens), size))
        shown = f"{steps / len(lens):.1f}" if system.is_static else "-"
        rows.append([system.name, shown, f"{queued[system.name]:.2f}"])
    columns = ["system", "steps per request, by arithmetic", "requests/s, ours"]
    return Table("With a full queue", columns, rows)
