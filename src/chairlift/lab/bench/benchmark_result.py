"""The result of a benchmark of engines: values of each run of each system, its table and its JSON line.

`bench throughput` and `bench latency` have one system, and `bench compare` has several, one for each policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.table import Table

from chairlift.events import EngineStarted
from chairlift.lab.bench.machine import MachineFacts, machine_caption, machine_facts, peak_rss_bytes
from chairlift.lab.metrics.run import ReportedMetric
from chairlift.lab.tables import make_table, print_report

RunValues = Mapping[str, float | None]
"""The unscaled values of one run by metric; a metric that the run does not have is None or missing."""


@dataclass(frozen=True, slots=True)
class MeasuredRange:
    """The median, the minimum and the maximum over the repeats of a measurement, in the unit of the values."""

    median: float
    min: float
    max: float

    @classmethod
    def from_values(cls, values: Sequence[float | None]) -> MeasuredRange | None:
        """The range of the values; None if a value is missing or there are none."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return cls(median(known), min(known), max(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """The runs of one or several systems, with the machine, the engines and the workload that they belong to.

    Attributes:
        title: the workload, for the table.
        options: the options of the benchmark.
        engines: the limits of the engine of each system.
        runs: the values of each run of each system, one for each round. The first system is the baseline.
        metrics: the metrics in the order of the table.
        ratios: the speeds and times, whose range and ratio to the baseline are shown too after several rounds.
        notes: lines for the caption.
        facts: further fields of the JSON line.
    """

    benchmark: str
    title: str
    options: Any
    engines: Mapping[str, EngineStarted]
    runs: Mapping[str, Sequence[RunValues]]
    metrics: Sequence[ReportedMetric]
    machine: MachineFacts = field(default_factory=machine_facts)
    peak_rss_bytes: int | None = field(default_factory=peak_rss_bytes)
    ratios: Sequence[str] = ()
    notes: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown_ratios(self) -> Sequence[str]:
        """The metrics whose ratio is shown: none after one round, because it does not show how far speeds vary."""
        return self.ratios if len(self.runs[self.baseline]) > 1 else ()

    @property
    def baseline(self) -> str:
        """Name of the system that the others are compared with."""
        return next(iter(self.runs))

    def spread(self, system: str, key: str) -> MeasuredRange | None:
        """The unscaled metric over the runs of a system; None if a run does not have it."""
        return MeasuredRange.from_values([run.get(key) for run in self.runs[system]])

    def ratio(self, system: str, key: str) -> MeasuredRange | None:
        """The ratio of the metric to the baseline's metric, computed in each round: a machine that becomes slower
        between rounds does not change it."""
        ratios: list[float | None] = []
        for run, base in zip(self.runs[system], self.runs[self.baseline], strict=True):
            value, base_value = run.get(key), base.get(key)
            ratios.append(None if value is None or not base_value else value / base_value)
        return MeasuredRange.from_values(ratios)

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, in seconds, bytes and shares."""
        return {
            "benchmark": self.benchmark,
            "machine": asdict(self.machine),
            "workload": asdict(self.options),
            "systems": {name: self._system(name) for name in self.runs},
            "peak_rss_bytes": self.peak_rss_bytes,
            **self.facts,
        }

    def _system(self, name: str) -> dict[str, Any]:
        spreads = {metric.key: self.spread(name, metric.key) for metric in self.metrics}
        ratios = {key: self.ratio(name, key) for key in self.shown_ratios}
        return {
            "engine": asdict(self.engines[name]),
            "results": {key: spread and asdict(spread) for key, spread in spreads.items()},
            "ratios": {key: ratio and asdict(ratio) for key, ratio in ratios.items()},
            "runs": [dict(run) for run in self.runs[name]],
        }

    def print(self, as_json: bool = False, *lines: str) -> None:
        """Print the table and further lines, or the JSON line."""
        print_report([self.table(), *lines], self.to_dict(), as_json)

    def table(self) -> Table:
        """A table of all metrics: a column for each of several systems, or the median and the range of a single one."""
        caption = "\n".join([machine_caption(self.machine, self.peak_rss_bytes), *self.notes])
        is_single = len(self.runs) == 1
        statistics = ["median", "min", "max"] if len(self.runs[self.baseline]) > 1 else ["value"]
        table = make_table(self.title, ["", *(statistics if is_single else self.runs)], caption)
        for metric in self.metrics:
            if not is_single:
                self._add_compared(table, metric)
            elif (spread := self.spread(self.baseline, metric.key)) is not None:
                values = (spread.median, spread.min, spread.max)
                table.add_row(metric.heading, *(metric.cell(value) for value in values[: len(statistics)]))
        return table

    def _add_compared(self, table: Table, metric: ReportedMetric) -> None:
        """Add the medians and, for a metric with ratios, the range and the median of the ratios of the rounds."""
        spreads = [self.spread(name, metric.key) for name in self.runs]
        if not any(spreads):
            return
        rows = {"median": metric.heading}
        if metric.key in self.shown_ratios:
            rows |= {"min": "  minimum", "max": "  maximum"}
        for statistic, label in rows.items():
            table.add_row(label, *(metric.cell(getattr(spread, statistic, None)) for spread in spreads))
        if metric.key in self.shown_ratios:
            ratios = [self.ratio(name, metric.key) for name in self.runs]
            cells = ("" if ratio is None else f"{ratio.median:.2f}" for ratio in ratios)
            table.add_row(f"  ratio to {self.baseline}", *cells, end_section=True)


def engine_limits(engine: EngineStarted) -> str:
    """One line for a caption: the pool and the limits of an engine."""
    return (
        f"KV pool {engine.num_blocks} blocks of {engine.block_size} = {engine.num_blocks * engine.block_size:,} slots, "
        f"max_num_seqs {engine.max_num_seqs}, max_num_batched_tokens {engine.max_num_batched_tokens}, "
        f"max_model_len {engine.max_model_len}"
    )


def engine_policies(engine: EngineStarted) -> str:
    """One line for a caption: the policies of an engine."""
    kv = engine.kv if engine.kv_arena is None else f"{engine.kv}, {engine.kv_arena}"
    static = ""
    if engine.static_batch_size is not None:
        static = f"({engine.static_batch_size}), run to {engine.static_run_to}"
    text = f"{engine.batching}{static}, kv {kv}, prefix cache {'on' if engine.enable_prefix_caching else 'off'}"
    if engine.scheduling_policy != "fcfs":
        text += f", scheduling policy {engine.scheduling_policy}"
    return text if engine.length_predictor == "none" else f"{text}, length predictor {engine.length_predictor}"
