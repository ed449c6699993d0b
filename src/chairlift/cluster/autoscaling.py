"""QueueScaling: the number of replicas from their queued prompt tokens, predicted times and batch use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from chairlift.observability.tracker import RequestTracker

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

TARGET_BATCH_USE: Final = 0.8
"""The target of `batch_use`: the rest of the seats and blocks is for requests that arrive meanwhile."""


class QueueScaling:
    """An autoscaling policy of Ray Serve. Ray applies the delays of the configuration to its results.

    Each replica reports its queued prompt tokens, its predicted time to first token, which grows with these tokens, and
    its batch use, which grows with its unfinished requests (see `batch_use`). The sum of a value over the replicas
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

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
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


def batch_use(tracker: RequestTracker) -> float:
    """The share of an engine that its unfinished requests need: the larger one of the unfinished requests by the seats,
    which exceeds 1 if requests wait, and of the held blocks of the KV pool, which limit the batch if the pool is small.

    Siblings count one by one, because each of them takes a seat of the batch.
    """
    started, num_unfinished = tracker.started, len(tracker.unfinished)
    if started is None or not num_unfinished:
        return 0.0
    num_seats = started.static_batch_size or started.max_num_seqs
    return max(num_unfinished / num_seats, tracker.num_held_blocks() / max(1, started.num_blocks))


def predict_ttft(queued_tokens: int, max_num_batched_tokens: int, step_seconds: Callable[[int], float | None]) -> float:
    """The estimated seconds until a new request gets its first token: those of computing the queued prompt tokens.

    Args:
        max_num_batched_tokens: the token budget of a step, of which the prompts use all.
        step_seconds: the estimated seconds of a step with a number of tokens; None counts as 0.
    """
    num_full_steps, rest = divmod(queued_tokens, max_num_batched_tokens)
    seconds = num_full_steps * (step_seconds(max_num_batched_tokens) or 0.0) if num_full_steps else 0.0
    return seconds + ((step_seconds(rest) or 0.0) if rest else 0.0)
