"""The metrics of several models as one collector."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class MergedMetrics(Collector):
    """Collects from several collectors, whose metrics with the same name differ in their labels.

    Each name occurs once in the output, as the text format of Prometheus requires.

    Args:
        collectors: returns the collectors at the time of a query.
    """

    def __init__(self, collectors: Callable[[], Iterable[Collector]]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for collector in self._collectors():
            for metric in collector.collect():
                if metric.name in merged:
                    merged[metric.name].samples.extend(metric.samples)
                else:
                    merged[metric.name] = metric
        return merged.values()


class ReplicaMetrics(Collector):
    """The metrics of a collector with the label `replica`."""

    def __init__(self, collector: Collector, replica_id: str) -> None:
        self._collector = collector
        self._label = {"replica": replica_id}

    def collect(self) -> Iterable[Metric]:
        for metric in self._collector.collect():
            metric.samples = [sample._replace(labels=sample.labels | self._label) for sample in metric.samples]
            yield metric
