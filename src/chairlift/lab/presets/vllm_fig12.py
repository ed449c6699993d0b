"""Figure 12 of the PagedAttention paper: normalized latency against request rate, by policy."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from chairlift.lab.presets import Preset, PresetOptions, PresetResult, Table
from chairlift.lab.presets.vllm_rates import (
    STEPS_AN_OCTAVE,
    THRESHOLDS,
    Point,
    curve,
    normalized_latency,
    ratio,
    sustained_rate,
)
from chairlift.lab.presets.vllm_setting import (
    DATASETS,
    MAX_MODEL_LEN,
    NUM_SLOTS,
    POLICIES,
    Load,
    constants,
    cost_model,
    sim_config,
)

STATIC: Final = "static"
STATIC_BATCH_SIZE: Final = NUM_SLOTS // MAX_MODEL_LEN
"""The most requests of max_model_len that the KV memory holds."""

NAMES: Final = {STATIC: "FasterTransformer", **POLICIES}

RANGES: Final = {"sharegpt": (0.04, 5.0), "alpaca": (0.25, 120.0)}
"""Lowest and highest rate, in requests a second."""

MINUTES: Final = {"sharegpt": 10.0, "alpaca": 2.0}
"""Of arrivals at each rate: some 60 times what a request takes, 10 and 2 seconds. The paper's traces lasted an hour."""

MIN_REQUESTS: Final = 200
"""At each rate, so that a mean is one."""

PUBLISHED: Final[dict[str, dict[str, tuple[float | None, float]]]] = {
    "sharegpt": {STATIC: (None, 22.0), "max": (2.7, 8.0), "oracle": (1.7, 2.7)},
    "alpaca": {"oracle": (1.3, 1.3)},
}
"""How many times another system's rate vLLM sustains at similar latency, from and to (sections 6.2 and 6.3). The ranges
on ShareGPT are over OPT-13B, 66B and 175B; the number on Alpaca is of OPT-13B."""

NOTES: Final = [
    "The published ranges on ShareGPT are over three models, of which this is the smallest, and the latencies at which "
    "they were read were not named. Ours are at the thresholds given, interpolated linearly between simulated rates.",
    "FasterTransformer is a stand-in: our own static batching with reservations of max_model_len, the largest batch "
    "that fits, answers when the whole batch is done, the same cost model. At low thresholds a request that waits for "
    "the batch before it is too slow already, so vLLM's advantage is largest there.",
    "A step of the roofline reads the weights once for the whole batch, and K and V for each request. The larger the "
    "batch, the more K and V weigh, so paging gains less in rate than in batch size (vllm-fig13).",
    "Against Oracle on Alpaca ours is above the paper's. The cost model charges a step a millisecond of the host; the "
    "engine of 2023 presumably took more, and more with every request, which weighs most where requests are many "
    "and short.",
    "Above what a policy can end, its queue grows as long as the trace lasts. A few minutes let a policy stay below a "
    "threshold at a rate at which an hour would not, most of all at the highest one, and all policies alike. "
    "The rates at 0.1 s are the ones to rely on.",
]


def run(options: PresetOptions) -> PresetResult:
    """Each data set under each policy at rising rates, until the latency is above all thresholds."""
    seed = options.workload_seed or 0
    tables: list[Table] = []
    ours: dict[str, Any] = {}
    for dataset in DATASETS:
        curves = _curves(dataset, seed, options.num_prompts)
        sustained = {kv: [sustained_rate(points, at) for at in THRESHOLDS] for kv, points in curves.items()}
        ratios = {kv: _ratios(sustained["paged"], rates) for kv, rates in sustained.items()}
        tables += [_curve_table(dataset, curves), _rate_table(dataset, sustained), _ratio_table(dataset, ratios)]
        ours[dataset] = {
            "normalized_latency_s": {kv: [[round(x, 4) for x in point] for point in curves[kv]] for kv in curves},
            "sustained_rate": {kv: [_rounded(rate) for rate in rates] for kv, rates in sustained.items()},
            "ratio": ratios,
        }
    return PresetResult(
        constants=[
            ("requests", f"{_arrivals(options)}; Poisson arrivals, seed {seed}; the same lengths at all rates"),
            ("rates", f"doubled; where the latency rises, {STEPS_AN_OCTAVE} to a double"),
            ("FasterTransformer", f"batching=static, kv=max, static_batch_size={STATIC_BATCH_SIZE}"),
            *constants(),
        ],
        tables=tables,
        notes=NOTES,
        published={dataset: {"ratio": ratios} for dataset, ratios in PUBLISHED.items()},
        ours={"thresholds_s": list(THRESHOLDS), **ours},
    )


def _arrivals(options: PresetOptions) -> str:
    if options.num_prompts is not None:
        return f"{options.num_prompts} at each rate"
    minutes = ", ".join(f"{name} {MINUTES[dataset]:g}" for dataset, name in DATASETS.items())
    return f"{minutes} minutes at each rate, at least {MIN_REQUESTS}"


def _ratios(rates: list[float | None], others: list[float | None]) -> list[float | None]:
    return [_rounded(ratio(rate, other)) for rate, other in zip(rates, others, strict=True)]


def _curves(dataset: str, seed: int, num_prompts: int | None) -> dict[str, list[Point]]:
    lowest, highest = RANGES[dataset]

    def count_at(rate: float) -> int:
        return max(MIN_REQUESTS, round(rate * MINUTES[dataset] * 60))

    load = Load.draw(dataset, seed, num_prompts or count_at(2 * highest))
    costs = cost_model()

    def points(name: str) -> list[Point]:
        is_static = name == STATIC
        config = sim_config("max" if is_static else name, static_batch_size=STATIC_BATCH_SIZE if is_static else None)

        def latency_at(rate: float) -> float:
            return normalized_latency(load.at_rate(rate, num_prompts or count_at(rate)), config, costs)

        return curve(latency_at, lowest, highest)

    return {name: points(name) for name in NAMES}


def _curve_table(dataset: str, curves: dict[str, list[Point]]) -> Table:
    """Rates by row: those at which several systems were simulated. A curve ends above all thresholds."""
    latency = {name: dict(points) for name, points in curves.items()}
    count = Counter(rate for points in curves.values() for rate, _ in points)
    rates = sorted(rate for rate in count if count[rate] > 1)
    rows = [[f"{rate:.3g}", *(_shown(latency[name].get(rate), 3) for name in NAMES)] for rate in rates]
    return Table(f"{DATASETS[dataset]}: normalized latency, ours, s/token", ["requests/s", *NAMES.values()], rows)


def _rate_table(dataset: str, sustained: dict[str, list[float | None]]) -> Table:
    rows = [[name, *(_shown(rate, 2) for rate in sustained[kv])] for kv, name in NAMES.items()]
    columns = ["system", *(f"at {threshold:g} s/token" for threshold in THRESHOLDS)]
    return Table(f"{DATASETS[dataset]}: requests/s sustained at a normalized latency, ours", columns, rows)


def _ratio_table(dataset: str, ratios: dict[str, list[float | None]]) -> Table:
    rows = []
    for kv, name in NAMES.items():
        if kv != "paged":
            rows.append([name, _range(PUBLISHED[dataset].get(kv)), *(_shown(number, 1) for number in ratios[kv])])
    columns = ["vLLM over", "published", *(f"ours, {threshold:g} s" for threshold in THRESHOLDS)]
    return Table(f"{DATASETS[dataset]}: how many times the rate vLLM sustains, at s/token", columns, rows)


def _range(bounds: tuple[float | None, float] | None) -> str:
    if bounds is None:
        return "-"
    low, high = bounds
    if low is None:
        return f"up to {high:g}"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)


def _shown(number: float | None, digits: int) -> str:
    return "-" if number is None else f"{number:.{digits}f}"


PRESET = Preset(
    name="vllm-fig12",
    title="Normalized latency by request rate, OPT-13B",
    source="Kwon et al., SOSP'23, Figure 12a and 12d, sections 6.2 and 6.3",
    run=run,
    takes=frozenset({"workload_seed", "num_prompts"}),
)
