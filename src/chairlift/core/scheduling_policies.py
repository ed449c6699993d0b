"""The switch over the orders of the queue: `--scheduling-policy`."""

from __future__ import annotations

from chairlift.config import SchedulerConfig
from chairlift.core.fair_queue import Fair
from chairlift.core.request_queue import FCFS, Priority, SchedulingPolicy


def make_scheduling_policy(config: SchedulerConfig) -> SchedulingPolicy:
    """As the configuration says (see `config.SCHEDULING_POLICIES`)."""
    if config.scheduling_policy == "fair":
        return Fair(config.tenant_weights)
    return Priority() if config.scheduling_policy == "priority" else FCFS()
