"""Figure 12 of the PagedAttention paper: normalized latency by request rate, and the rate that each policy sustains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from chairlift.lab.presets import PresetOptions, PresetResult, Table, format_number
from chairlift.lab.presets import vllm_experiments as vllm
from chairlift.lab.presets.capacity import at_rate, measure

STATIC: Final = "static"
STATIC_BATCH_SIZE: Final = vllm.NUM_SLOTS // vllm.MAX_MODEL_LEN
"""The number of requests of max_model_len that fit into the KV memory."""

NAMES: Final = {STATIC: "FasterTransformer", **vllm.POLICIES}

RANGES: Final = {"sharegpt": (0.04, 5.0), "alpaca": (0.25, 120.0)}
"""Lowest and highest rate, in requests per second."""

STEPS_PER_OCTAVE: Final = 6
"""Rates between one and its double, where the latency rises."""

THRESHOLDS: Final = (0.1, 0.2, 0.5, 1.0)
"""Seconds of normalized latency at which rates are compared. The paper names none; its figures end at 1."""

MINUTES: Final = {"sharegpt": 10.0, "alpaca": 2.0}
"""Minutes of arrivals at each rate: about 60 times the duration of a request, 10 and 2 seconds. The paper's traces last
an hour."""

MIN_REQUESTS: Final = 200
"""Minimum number of requests at each rate, for a meaningful mean."""

PUBLISHED: Final[dict[str, dict[str, tuple[float | None, float]]]] = {
    "sharegpt": {STATIC: (None, 22.0), "max": (2.7, 8.0), "oracle": (1.7, 2.7)},
    "alpaca": {"oracle": (1.3, 1.3)},
}
"""The rate that vLLM sustains, divided by that of another system at similar latency: minimum and maximum (sections 6.2
and 6.3). The ranges on ShareGPT are over OPT-13B, 66B and 175B; the number on Alpaca is for OPT-13B."""

NOTES: Final = [
    "The published ranges on ShareGPT are over three models, of which this is the smallest, and the latencies at which "
    "they were read were not named. Ours are at the thresholds given, interpolated linearly between simulated rates.",
    "FasterTransformer is replaced by our static batching with reservations of max_model_len and the largest batch "
    "that fits, which returns all outputs when the whole batch has finished, with the same cost model. At low "
    "thresholds a request that waits for the batch before it is too slow already, so vLLM's advantage is largest "
    "there.",
    "A step of the roofline reads the weights once for the whole batch, and K and V for each request. The larger the "
    "batch, the larger is the share of K and V, so paging gains less in rate than in batch size (vllm-fig13).",
    "Compared with Oracle on Alpaca ours is above the paper's. A step costs a millisecond on the host in the cost "
    "model; the engine of 2023 presumably needed more, and more for every request, which has most effect with many "
    "short requests.",
    "Above the rate that a policy can sustain, its queue grows for the length of the trace. In a few minutes a policy "
    "can stay below a threshold at a rate at which it would not in an hour, especially below the highest threshold, "
    "and this holds for all policies. The rates at 0.1 s are the most reliable.",
]


class RatePoint(NamedTuple):
    """The mean normalized latency (E2E latency per output token) in seconds, at a rate in requests per second."""

    rate: float
    latency: float


def run(options: PresetOptions) -> PresetResult:
    """Simulates each data set under each policy at rising rates, until the latency is above all thresholds."""
    seed = options.workload_seed or 0
    tables: list[Table] = []
    ours: dict[str, Any] = {}
    for dataset in vllm.DATASETS:
        curves = _curves(dataset, seed, options.num_prompts)
        sustained = {kv: [sustained_rate(points, limit) for limit in THRESHOLDS] for kv, points in curves.items()}
        ratios = {kv: _ratios(sustained["paged"], rates) for kv, rates in sustained.items()}
        tables += [_curve_table(dataset, curves), _rate_table(dataset, sustained), _ratio_table(dataset, ratios)]
        ours[dataset] = {
            "normalized_latency_s": {kv: [[round(x, 4) for x in point] for point in curves[kv]] for kv in curves},
            "sustained_rate": {kv: [rate and round(rate, 3) for rate in rates] for kv, rates in sustained.items()},
            "ratio": ratios,
        }
    return PresetResult(
        constants=[
            ("requests", f"{_arrivals(options)}; Poisson arrivals, seed {seed}; the same lengths at all rates"),
            ("rates", f"doubled; where the latency rises, {STEPS_PER_OCTAVE} per doubling"),
            ("FasterTransformer", f"batching=static, kv=max, static_batch_size={STATIC_BATCH_SIZE}"),
            *vllm.constants(),
        ],
        tables=tables,
        notes=NOTES,
        published={dataset: {"ratio": ratios} for dataset, ratios in PUBLISHED.items()},
        ours={"thresholds_s": list(THRESHOLDS), **ours},
    )


def _arrivals(options: PresetOptions) -> str:
    if options.num_prompts is not None:
        return f"{options.num_prompts} at each rate"
    minutes = ", ".join(f"{name} {MINUTES[dataset]:g}" for dataset, name in vllm.DATASETS.items())
    return f"{minutes} minutes at each rate, at least {MIN_REQUESTS}"


def _ratios(rates: list[float | None], others: list[float | None]) -> list[float | None]:
    """Returns the quotients, or None where one of the rates is unknown."""
    pairs = zip(rates, others, strict=True)
    return [None if rate is None or other is None else round(rate / other, 3) for rate, other in pairs]


def _curves(dataset: str, seed: int, num_prompts: int | None) -> dict[str, list[RatePoint]]:
    lowest, highest = RANGES[dataset]

    def count_at(rate: float) -> int:
        return num_prompts or max(MIN_REQUESTS, round(rate * MINUTES[dataset] * 60))

    requests = vllm.draw_requests(dataset, seed, count_at(2 * highest))
    costs = vllm.cost_model()

    def points(name: str) -> list[RatePoint]:
        static_batch_size = STATIC_BATCH_SIZE if name == STATIC else None
        config = vllm.sim_config("max" if name == STATIC else name, static_batch_size=static_batch_size)

        def latency_at(rate: float) -> float:
            summary = measure(at_rate(requests[: count_at(rate)], rate), config, costs).normalized_latency
            assert summary is not None, "every request has finished"
            return summary.mean

        return latency_curve(latency_at, lowest, highest)

    return {name: points(name) for name in NAMES}


def latency_curve(latency_at: Callable[[float], float], lowest: float, highest: float) -> list[RatePoint]:
    """Returns the latency at rising rates, which are on one scale, so that the curves of policies are comparable.

    Rates are doubled from `lowest` until the latency is above all thresholds or the rate above `highest`. Between the
    last rate with a latency below all thresholds and the first one above, STEPS_PER_OCTAVE rates are simulated:

    lowest    2 * lowest    4 * lowest          8 * lowest
       o           o             o   .   .   .   .   o
    """
    latencies: dict[int, float] = {}

    def rate_at(index: int) -> float:
        return lowest * 2 ** (index / STEPS_PER_OCTAVE)

    def is_above_thresholds(index: int) -> bool:
        if index not in latencies:
            latencies[index] = latency_at(rate_at(index))
        return latencies[index] > max(THRESHOLDS)

    last = 0
    while not is_above_thresholds(last) and rate_at(last) < highest:
        last += STEPS_PER_OCTAVE
    first = max((index for index, latency in latencies.items() if latency <= min(THRESHOLDS)), default=0)
    for index in range(first, last):
        if is_above_thresholds(index):
            break
    return [RatePoint(rate_at(index), latencies[index]) for index in sorted(latencies)]


def sustained_rate(points: Sequence[RatePoint], threshold: float) -> float | None:
    """Returns the rate at which the latency first exceeds the threshold, interpolated linearly between two points.

    None if the first point exceeds it already, or no point does.
    """
    if points[0].latency > threshold:
        return None
    for low, high in pairwise(points):
        if high.latency > threshold:
            return low.rate + (high.rate - low.rate) * (threshold - low.latency) / (high.latency - low.latency)
    return None


def _curve_table(dataset: str, curves: dict[str, list[RatePoint]]) -> Table:
    """Returns the latencies at the rates at which several systems were simulated."""
    latency = {name: dict(points) for name, points in curves.items()}
    count = Counter(rate for points in curves.values() for rate, _ in points)
    rates = sorted(rate for rate in count if count[rate] > 1)
    rows = [[f"{rate:.3g}", *(format_number(latency[name].get(rate), 3) for name in NAMES)] for rate in rates]
    return Table(f"{vllm.DATASETS[dataset]}: normalized latency, ours, s/token", ["requests/s", *NAMES.values()], rows)


def _rate_table(dataset: str, sustained: dict[str, list[float | None]]) -> Table:
    rows = [[name, *(format_number(rate, 2) for rate in sustained[kv])] for kv, name in NAMES.items()]
    columns = ["system", *(f"at {threshold:g} s/token" for threshold in THRESHOLDS)]
    return Table(f"{vllm.DATASETS[dataset]}: requests/s sustained at a normalized latency, ours", columns, rows)


def _ratio_table(dataset: str, ratios: dict[str, list[float | None]]) -> Table:
    rows = []
    for kv, name in NAMES.items():
        if kv != "paged":
            shown = [format_number(ratio, 1) for ratio in ratios[kv]]
            rows.append([name, _range(PUBLISHED[dataset].get(kv)), *shown])
    columns = ["vLLM over", "published", *(f"ours, {threshold:g} s" for threshold in THRESHOLDS)]
    return Table(f"{vllm.DATASETS[dataset]}: rate sustained by vLLM divided by that of another system", columns, rows)


def _range(bounds: tuple[float | None, float] | None) -> str:
    if bounds is None:
        return "-"
    low, high = bounds
    if low is None:
        return f"up to {high:g}"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
