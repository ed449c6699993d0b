"""QueueScaling: the number of replicas from their queued prompt tokens, predicted times and batch use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from chairlift.events import EngineStarted, Event, RequestArrived, RequestFinished, Step

TARGET_BATCH_USE: Final = 0.8
"""The target of `BatchUseMeter.value`: the rest of the seats and blocks is for requests that arrive meanwhile."""


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

    Each replica reports its queued prompt tokens, its predicted time to first token, which grows with these tokens, and
    its batch use, which grows with its unfinished requests (see `BatchUseMeter`). The sum of a value over the replicas
    is the load of the cluster. Divided by the target of one replica, it is the number of replicas that have the target
    on average; the largest of the three numbers is used. Without queued prompts the first two values are 0, and the
    batch use keeps as many replicas as the running requests need. Requests do not move to a new replica: it receives
    later ones.

    Args:
        target_queued_tokens: prompt tokens that may wait in a replica.
        target_ttft: seconds of the predicted time to first token.
    """

    def __init__(self, target_queued_tokens: float, target_ttft: float) -> None:
        self._targets = {
            "queued_tokens": target_queued_tokens,
            "predicted_ttft": target_ttft,
            "batch_use": TARGET_BATCH_USE,
        }

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the state of the policy, which is empty."""
        metrics = context.aggregated_metrics or {}
        wanted = [
            math.ceil(sum(by_replica.values()) / target)
            for name, target in self._targets.items()
            if (by_replica := metrics.get(name))
        ]
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        count = max(wanted, default=context.current_num_replicas)
        return max(least, min(most, count)), {}


class BatchUseMeter:
    """Measures the share of an engine that its unfinished requests need, from the events of the engine.

    Siblings count one by one, because each of them takes a seat of the batch.
    """

    def __init__(self) -> None:
        self._num_unfinished = 0
        self._num_seats = self._num_blocks = self._free_blocks = 1

    def emit(self, event: Event) -> None:
        """Receive an event of the engine."""
        if isinstance(event, Step):
            self._free_blocks = event.free_blocks
        elif isinstance(event, RequestArrived):
            if not self._num_unfinished:  # The last step was scheduled before its requests released their blocks.
                self._free_blocks = self._num_blocks
            self._num_unfinished += 1
        elif isinstance(event, RequestFinished):
            self._num_unfinished -= 1
        elif isinstance(event, EngineStarted):
            self._num_unfinished = 0
            self._num_seats = event.static_batch_size or event.max_num_seqs
            self._num_blocks = self._free_blocks = max(1, event.num_blocks)

    @property
    def value(self) -> float:
        """The larger one of two shares: unfinished requests of the seats, which exceeds 1 if requests wait, and held
        blocks of the KV pool, which limit the batch if the pool is small."""
        if not self._num_unfinished:
            return 0.0
        return max(self._num_unfinished / self._num_seats, 1 - self._free_blocks / self._num_blocks)


def predict_ttft(queued_tokens: int, max_num_batched_tokens: int, step_seconds: Callable[[int], float | None]) -> float:
    """The estimated seconds until a new request gets its first token: those of computing the queued prompt tokens.

    Args:
        max_num_batched_tokens: the token budget of a step, of which the prompts use all.
        step_seconds: the estimated seconds of a step with a number of tokens; None counts as 0.
    """
    num_full_steps, rest = divmod(queued_tokens, max_num_batched_tokens)
    seconds = num_full_steps * (step_seconds(max_num_batched_tokens) or 0.0) if num_full_steps else 0.0
    return seconds + ((step_seconds(rest) or 0.0) if rest else 0.0)
