"""Selects the order of the queue that the option `--scheduling-policy` names."""

from __future__ import annotations

from chairlift.config import SchedulerConfig
from chairlift.core.queues.fair_queue import FairQueue
from chairlift.core.queues.request_queue import PriorityQueue, RequestQueue
from chairlift.core.queues.shortest_remaining import ShortestRemainingQueue


def make_queue(config: SchedulerConfig) -> RequestQueue:
    """Create an empty queue with the policy that `config.scheduling_policy` names."""
    if config.scheduling_policy == "fair":
        return FairQueue(config.tenant_weights)
    queues = {"fcfs": RequestQueue, "priority": PriorityQueue, "srpt": ShortestRemainingQueue}
    return queues[config.scheduling_policy]()
