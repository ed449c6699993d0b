"""QueueScaling: the number of replicas from their queued prompt tokens and predicted times to the first token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class ScalingContext(Protocol):
    """What is used of `ray.serve.config.AutoscalingContext`."""

    @property
    def current_num_replicas(self) -> int: ...

    @property
    def capacity_adjusted_min_replicas(self) -> int: ...

    @property
    def capacity_adjusted_max_replicas(self) -> int: ...

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class QueueScaling:
    """An autoscaling policy of Ray Serve. Ray applies the delays of the configuration to its results.

    The replicas share their queued tokens equally after a change, and a predicted time is proportional to them, so that
    n replicas with x times the target become n * x replicas; the larger one of both results is used.

    Args:
        target_queued_tokens: prompt tokens that may wait in a replica.
        target_ttft: seconds of the predicted time to the first token.
    """

    def __init__(self, target_queued_tokens: float, target_ttft: float) -> None:
        self._targets = {"queued_tokens": target_queued_tokens, "predicted_ttft": target_ttft}

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the state of the policy, which is empty."""
        metrics = context.aggregated_metrics or {}
        wanted = [
            math.ceil(sum(values) / target)
            for name, target in self._targets.items()
            if (values := _values(metrics.get(name)))
        ]
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        count = max(wanted, default=context.current_num_replicas)
        return max(least, min(most, count)), {}


def _values(by_replica: Mapping[Any, float] | None) -> Iterable[float]:
    return [] if by_replica is None else list(by_replica.values())
