"""The metrics of several models as one collector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class MergedMetrics(Collector):
    """Collects from several collectors, whose metrics with the same name differ in their labels.

    Each name occurs once in the output, as the text format of Prometheus requires.
    """

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for collector in self._collectors:
            for metric in collector.collect():
                if metric.name in merged:
                    merged[metric.name].samples.extend(metric.samples)
                else:
                    merged[metric.name] = metric
        return merged.values()
