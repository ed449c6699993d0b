"""Selects the order of the queue that the option `--scheduling-policy` names."""

from __future__ import annotations

from typing import Final

from chairlift.config import SchedulerConfig
from chairlift.core.queues.fair_queue import FairQueue
from chairlift.core.queues.multilevel_feedback import MultilevelFeedbackQueue
from chairlift.core.queues.request_queue import PriorityQueue, RequestQueue
from chairlift.core.queues.shortest_remaining import ShortestRemainingQueue

QUEUES: Final[dict[str, type[RequestQueue]]] = {
    "fcfs": RequestQueue,
    "priority": PriorityQueue,
    "srpt": ShortestRemainingQueue,
    "mlfq": MultilevelFeedbackQueue,
}


def make_queue(config: SchedulerConfig) -> RequestQueue:
    """Create an empty queue with the policy that `config.scheduling_policy` names."""
    if config.scheduling_policy == "fair":
        return FairQueue(config.tenant_weights)
    return QUEUES[config.scheduling_policy]()
