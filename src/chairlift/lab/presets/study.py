"""A study of a preset: its engines and requests, and the table of published and simulated values.

The settings of a run are merged from the preset, the study, the parts of the label of the case, the case and
the system, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from rich.table import Table

from chairlift.config import SCHEDULING_POLICIES, SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.errors import ConfigError
from chairlift.events import SLOT_KINDS
from chairlift.lab.metrics.run import REPORTED_METRICS
from chairlift.lab.sim.devices import DEVICES, Device
from chairlift.lab.sim.disaggregation import Instances
from chairlift.lab.sim.executor import TOP_TOKEN
from chairlift.lab.sim.kernel_roofline import KernelRoofline
from chairlift.lab.sim.model_shape import ModelShape, model_shape
from chairlift.lab.sim.roofline import Roofline, block_copy_seconds
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.tables import make_table
from chairlift.lab.workload.anyscale import anyscale_workload
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import paired_lengths, parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload
from chairlift.lab.workload.traces import TraceOptions, read_trace
from chairlift.slo import SLO

MEMORY_SHARE: Final = 0.9
"""The share of device memory for weights, K and V: the default of vLLM's `gpu_memory_utilization`."""

SYSTEMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "scheduling policies": {name: {"engine": {"scheduling_policy": name}} for name in SCHEDULING_POLICIES},
    "block sizes": {str(1 << n): {"engine": {"kv": "paged", "block_size": 1 << n}} for n in range(9)},
}
"""Systems that a preset can name instead of its own."""

POLICY_SETTINGS: Final = ("scheduling_policy", "length_predictor", "batching", "static_batch_size", "static_run_to")
"""The settings of an engine that are fields of `SchedulerConfig` and may be missing."""

HEADINGS: Final = {
    metric.key: metric.heading for metric in REPORTED_METRICS if metric.scale == 1 or metric.key in SLOT_KINDS
} | {
    "external": "external fragmentation and others, %",
    "waste": "all but token states, %",
    "batch": "running requests",
    "batch_by_time": "running requests by time",
    "saved": "memory saved, %",
    "hit_rate": "hit rate",
    "service_gap": "difference of service at the last arrival",
    "largest_service_gap": "largest difference",
    "finished_per_s": "requests/s",
    "held": "slots reserved",
    "written": "slots written",
    "never_used": "slots never used",
    "num_steps": "steps",
    "peak_batch_size": "largest batch",
    "swap_out_ms": "swap out, ms",
    "swap_ms": "swap out and in, ms",
    "recompute_ms": "recompute, ms",
    "swap_by_recompute": "swap out and in divided by recompute",
    "itl_p99": "ITL p99, s",
    "queue_time_p50": "queue time p50, s",
    "completion_ratio": "finished requests per arrival",
    "e2e_latency_p90": "E2E latency p90, s",
    "normalized_latency_p50": "E2E latency per output token, p50, s",
}
"""The headings of the measures: the metrics of runs that are shown without a scale, the kinds of slots,
which are shares in percent here, and others."""


@dataclass(frozen=True)
class StudySystem:
    """One system in one case of a study, with its merged settings.

    Attributes:
        limits: the conditions of a search for the highest rate (see `rate_sweep`).
    """

    study: Study
    case: str
    name: str
    engine: Mapping[str, Any]
    workload: Mapping[str, Any]
    rates: Sequence[float]
    limits: Mapping[str, Mapping[str, Any]]

    @property
    def label(self) -> str:
        return ", ".join(part for part in (self.case, self.name) if part)

    @property
    def model(self) -> ModelShape:
        return model_shape(self.engine["model"])

    @property
    def device(self) -> Device:
        device = self.engine["device"]
        return DEVICES[device] if isinstance(device, str) else Device(**device)

    @cached_property
    def cost_model(self) -> Roofline:
        roofline = KernelRoofline if self.engine.get("has_each_kernel") else Roofline
        return roofline(self.model, self.device, self.engine.get("tensor_parallel_size", 1))

    @property
    def instances(self) -> Instances | None:
        """The instances of disaggregated prefill and decode; None if one engine computes both."""
        if "instances" not in self.engine:
            return None
        assert self.device.link_bandwidth > 0, f"{self.device.name} has no link"
        transfer_seconds = self.model.kv_bytes_per_slot / self.device.link_bandwidth
        return Instances(**self.engine["instances"], transfer_seconds=transfer_seconds)

    @property
    def num_instances(self) -> int:
        return sum(self.engine["instances"].values()) if "instances" in self.engine else 1

    @property
    def num_slots(self) -> int:
        """The number of KV slots: as given, the token budget (`quota`), or what the devices hold beside the weights."""
        if self.engine.get("quota"):
            return int(self.engine["max_num_batched_tokens"])
        if "num_slots" in self.engine:
            return int(self.engine["num_slots"])
        return num_kv_slots(self.model, self.device, self.engine.get("num_devices", 1))

    @property
    def config(self) -> SimConfig:
        """The simulated engine. A token budget of null is max_model_len, so that no prompt is divided."""
        engine = self.engine
        policies = {name: engine[name] for name in POLICY_SETTINGS if name in engine}
        limits = SchedulerConfig(
            engine["max_model_len"],
            engine["max_num_seqs"],
            engine["max_num_batched_tokens"] or engine["max_model_len"],
            **policies,
        )
        block_size, kv = engine.get("block_size", 16), engine.get("kv", "paged")
        num_swap_blocks = int(engine.get("swap_gib", 0) * (1 << 30)) // (block_size * self.model.kv_bytes_per_slot)
        pool = KVPool(
            self.num_slots // block_size,
            block_size,
            limits.max_model_len,
            kv,
            "buddy" if kv == "paged" else engine.get("kv_arena", "buddy"),
            num_swap_blocks=num_swap_blocks,
        )
        return SimConfig(
            limits,
            pool,
            enable_prefix_caching=engine.get("enable_prefix_caching", False),
            model=self.model,
            block_copy_seconds=block_copy_seconds(block_size, self.model, self.device),
            top_token=engine.get("top_token", TOP_TOKEN),
        )

    @property
    def count(self) -> int:
        """The number of requests of a run."""
        return int(self.study.num_prompts or self.workload.get("num_prompts", 1))

    def requests(self, seed: int) -> list[WorkloadRequest]:
        """Draw the requests, which arrive once per second on average. `at_rate` changes their rate and nothing else."""
        requests = self._draw(seed) if self.study.trace is None else self._read(self.study.trace)
        if self.workload.get("slo") is not None:
            requests = [replace(request, slo=SLO(**self.workload["slo"])) for request in requests]
        if self.workload.get("max_tokens") is not None:
            requests = [replace(request, max_tokens=self.workload["max_tokens"]) for request in requests]
        if "token_by_token" in self.workload:
            requests = token_by_token(requests, self.workload["token_by_token"])
        return requests

    def _read(self, trace: Path) -> list[WorkloadRequest]:
        """The first requests of a trace that fit into max_model_len."""
        longest = self.engine["max_model_len"]
        found = read_trace(trace, TraceOptions(limit=self.count))
        requests = [each for each in found if len(each.prompt_token_ids) + each.output_len <= longest]
        if not requests:
            raise ConfigError(f"{trace}: none of {len(found)} requests has at most {longest} tokens")
        return at_rate(requests, requests[-1].arrival / len(requests) or math.inf)

    def _draw(self, seed: int) -> list[WorkloadRequest]:
        workload, count, vocab_size = self.workload, self.count, self.model.vocab_size
        if "request" in workload:
            prompt_len, output_len, max_tokens = workload["request"]
            return [WorkloadRequest(self.case, 0.0, list(range(prompt_len)), output_len, max_tokens)]
        if "histogram" in workload:
            return draw_histogram(workload["histogram"], self.engine["max_model_len"], seed, count)
        if "anyscale" in workload:
            return anyscale_workload(workload["anyscale"], count, request_rate=workload.get("request_rate"))
        if "clients" in workload:
            return client_requests(workload["clients"], count, workload["input_len"], workload["output_len"])
        prompt, output = parse_lengths(workload["input_len"]), parse_lengths(workload["output_len"])
        return make_workload(
            seed,
            count,
            prompt,
            output,
            ArrivalProcess(1.0),
            vocab_size,
            prefix_len=workload.get("prefix", 0),
            max_model_len=workload.get("max_model_len"),
        )


@dataclass(frozen=True)
class Study:
    """One table of a preset with its options.

    Attributes:
        preset: the fields of the preset's file.
        settings: the fields of the study.
        num_prompts: number of requests of each run; None: as in the workload.
        trace: the user's trace, if the preset needs one.
    """

    preset: Mapping[str, Any]
    settings: Mapping[str, Any]
    seed: int
    num_prompts: int | None
    trace: Path | None = None

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.settings.get("seeds", 1))

    @property
    def measures(self) -> list[str]:
        return list(self.settings.get("measures", ()))

    def systems(self) -> Iterator[StudySystem]:
        """All systems of all cases."""
        known = self.preset["systems"]
        systems = SYSTEMS[known] if isinstance(known, str) else known
        names = self.settings.get("systems", list(systems))
        parts = self.preset.get("parts", {})
        for case, own in self.settings.get("cases", {"": {}}).items():
            of_label = [parts[part] for part in case.split(", ") if part in parts]
            rates, at_most = own.get("rates", self.settings.get("rates", ())), own.get("at_most", {})
            limits = {
                name: {**limit, "at_most": {**limit.get("at_most", {}), **at_most}}
                for name, limit in self.settings.get("limits", {}).items()
            }
            for name in names:
                levels = (self.preset, self.settings, *of_label, own, systems[name])
                engine, workload = (
                    dict(pair for level in levels for pair in level.get(part, {}).items())
                    for part in ("engine", "workload")
                )
                yield StudySystem(self, case, name, engine, workload, rates, limits)

    def constants(self) -> list[tuple[str, str]]:
        """The settings that were chosen and the constants of the cost models, as (name, value)."""
        first, *_ = systems = list(self.systems())
        requests = " or ".join(dict.fromkeys(f"{system.count:,}" for system in systems))
        seeds = f"seed {self.seed}" if len(self.seeds) == 1 else f"seeds {self.seeds[0]} to {self.seeds[-1]}"
        runs = f"{requests} requests per run, {seeds}"
        if self.trace is not None:
            runs = f"at most {requests} requests of {self.trace}"
        found = [(self.settings["title"], runs)]
        for part in ("engine", "workload"):
            common = set.intersection(*({str(pair) for pair in getattr(each, part).items()} for each in systems))
            chosen = [pair for pair in getattr(first, part).items() if str(pair) in common]
            found += [(name, str(value)) for name, value in chosen if name not in ("model", "device", "num_prompts")]
        for system in systems:
            found += system.cost_model.constants() if "model" in system.engine else []
        return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """The mean of a value over the seeds, and the largest deviation from it."""

    mean: float
    deviation: float = 0.0

    @classmethod
    def from_values(cls, values: Sequence[float]) -> MeasuredValue:
        mean = fmean(values)
        return cls(mean, max(abs(value - mean) for value in values))


Row = dict[str, MeasuredValue | None]
"""The values of one row by measure; None if there is none, such as an infinite rate."""


@dataclass(frozen=True, slots=True)
class StudyResult:
    """The simulated values of a study beside the published ones.

    Attributes:
        rows: the values of each row by its label.
        keys: the case, within which ratios are computed, and the system of each row.
        headings: the headings of measures that are not in HEADINGS.
    """

    study: Study
    rows: dict[str, Row] = field(default_factory=dict)
    keys: dict[str, tuple[str, str]] = field(default_factory=dict)
    headings: dict[str, str] = field(default_factory=dict)

    def add(self, system: StudySystem, row: Row, prefix: str = "") -> None:
        """Add a row of a system; `prefix` names it if the system has several."""
        self.rows[prefix + system.label] = row
        self.keys[prefix + system.label] = (prefix + system.case, system.name)

    @property
    def measures(self) -> list[str]:
        return list(next(iter(self.rows.values())))

    def published(self, label: str, measure: str) -> float | str | None:
        """A number, a text such as "about 8", or None if nothing was published."""
        row = self.study.settings.get("published", {}).get(label, {})
        value: float | str | None = row.get(measure, row.get("ratio") if measure.endswith(" ratio") else None)
        return value

    def ratio(self, label: str, measure: str) -> float | None:
        """The ratio of a row and another row of its case.

        The study names the other one: the row is divided by it (`to` a system, or `to` the lowest), or it is divided by
        the row (`of` a system).
        """
        settings, case = self.study.settings["ratio"], self.keys[label][0]
        values = {self.keys[each][1]: row[measure] for each, row in self.rows.items() if self.keys[each][0] == case}
        known = {name: value.mean for name, value in values.items() if value is not None}
        own = known.get(self.keys[label][1])
        if "of" in settings:
            return known[settings["of"]] / own if own and settings["of"] in known else None
        base = min(known.values(), default=None) if settings["to"] == "lowest" else known.get(settings["to"])
        return own / base if own is not None and base else None

    def to_dict(self) -> dict[str, Any]:
        """The values for JSON: published and ours by row and measure."""
        rows: dict[str, Any] = {}
        for label, row in self.rows.items():
            rows[label] = {
                measure: {"published": self.published(label, measure), "ours": value and round(value.mean, 4)}
                | ({"deviation": round(value.deviation, 4)} if value and len(self.study.seeds) > 1 else {})
                for measure, value in row.items()
            }
            for measure in self.ratios:
                ratio = self.ratio(label, measure)
                name = f"{measure} ratio"
                rows[label][name] = {"published": self.published(label, name), "ours": ratio and round(ratio, 3)}
        return {"title": self.study.settings["title"], "rows": rows}

    @property
    def ratios(self) -> list[str]:
        """The measures whose ratio is shown."""
        return list(self.study.settings.get("ratio", {}).get("measures", ()))

    def table(self) -> Table:
        """The table of published and simulated values; ± is the largest deviation of a seed."""
        columns, record = [self.study.settings.get("column", "system")], self.to_dict()["rows"]
        names = [*self.measures, *(f"{measure} ratio" for measure in self.ratios)]
        shown = {name: any(row[name]["published"] is not None for row in record.values()) for name in names}
        for name, is_published in shown.items():
            heading = self._heading(name)
            columns += [f"{heading}, published", "ours"] if is_published else [f"{heading}, ours"]
        rows = []
        for label, row in record.items():
            cells = [label]
            for name, is_published in shown.items():
                cells += [format_value(row[name]["published"])] if is_published else []
                deviation = f" ± {format_value(row[name]['deviation'])}" if "deviation" in row[name] else ""
                cells.append(format_value(row[name]["ours"]) + deviation)
            rows.append(cells)
        return make_table(self.study.settings["title"], columns, rows=rows)

    def _heading(self, name: str) -> str:
        measure = name.removesuffix(" ratio")
        label = self.headings.get(measure) or HEADINGS[measure]
        if measure == name:
            return label
        settings = self.study.settings["ratio"]
        what = f"{settings['of']} divided by it" if "of" in settings else f"ratio to {settings['to']}"
        return f"{label.partition(',')[0]}, {what}"


Measure = Callable[[StudySystem, int], Mapping[str, float]]
"""Returns the measures of the study of a system, and perhaps others, for a seed."""


def measure_systems(measure: Measure, study: Study, advance: Callable[[], object]) -> StudyResult:
    """The result with one row for each system: the means over the seeds of the study."""
    result = StudyResult(study)
    for system in study.systems():
        found = [measure(system, seed) for seed in study.seeds]
        row: Row = {name: MeasuredValue.from_values([each[name] for each in found]) for name in study.measures}
        result.add(system, row)
        advance()
    return result


def format_value(value: float | str | None) -> str:
    """The cell of a number with about three digits, a text, or a dash."""
    if value is None or isinstance(value, str):
        return value or "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value == round(value, 2) else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def num_kv_slots(model: ModelShape, device: Device, num_devices: int) -> int:
    """The number of KV slots that fit into `num_devices` devices in addition to the weights of a model."""
    num_bytes = MEMORY_SHARE * num_devices * device.memory_bytes - model.weight_bytes
    assert num_bytes > 0, f"{model.name} does not fit into {num_devices} of {device.name}"
    return int(num_bytes // model.kv_bytes_per_slot)


def draw_histogram(dataset: str, max_model_len: int, seed: int, count: int) -> list[WorkloadRequest]:
    """Draw `count` requests with the lengths of a data set, which arrive once per second on average.

    Prompt and output lengths are drawn independently, because the vLLM paper does not publish which prompt belongs to
    which output. The tokens of the prompts are zeros, which no policy without a prefix cache reads.
    """
    prompt, output = parse_lengths(f"hist:{dataset}-input"), parse_lengths(f"hist:{dataset}-output")
    pairs = paired_lengths(prompt, output, max_model_len, np.random.default_rng([seed, 0]), count)
    times = ArrivalProcess(1.0).times(np.random.default_rng([seed, 1]), count)
    return [
        WorkloadRequest(f"r{index}", time, bytes(prompt_len), output_len)
        for index, (time, (prompt_len, output_len)) in enumerate(zip(times, pairs, strict=True))
    ]


def client_requests(
    clients: Mapping[str, float], count: int, prompt_len: int, output_len: int
) -> list[WorkloadRequest]:
    """Return the first `count` requests of clients that each send at a constant rate, in requests per minute."""
    arrivals = sorted((60 * index / rate, client) for client, rate in clients.items() for index in range(count))
    return [
        WorkloadRequest(f"r{index}", time, bytes(prompt_len), output_len, tenant=client)
        for index, (time, client) in enumerate(arrivals[:count])
    ]


def token_by_token(requests: Sequence[WorkloadRequest], batch_size: int) -> list[WorkloadRequest]:
    """Transform requests to the steps of FasterTransformer for prompts of different lengths (Yu et al., section 6.2).

    Its first step computes all prompts of a batch up to the length of the shortest, and the rest of each prompt one
    token per step. Batches consist of consecutive requests, as with a full queue.
    """
    transformed = []
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        shortest = min(len(request.prompt_token_ids) for request in batch)
        for request in batch:
            rest = len(request.prompt_token_ids) - shortest
            prompt = request.prompt_token_ids[:shortest]
            transformed.append(replace(request, prompt_token_ids=prompt, output_len=request.output_len + rest))
    return transformed


def at_rate(requests: Sequence[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """Requests that arrive once per second on average at `rate` per second instead; infinite: all at once."""
    return [replace(request, arrival=request.arrival / rate) for request in requests]
