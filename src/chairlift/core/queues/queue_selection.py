"""Selects the order of the queue that the option `--scheduling-policy` names."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.config import SchedulerConfig
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.queues.earliest_deadline import EarliestDeadlineQueue
from chairlift.core.queues.fair_queue import FairQueue
from chairlift.core.queues.multilevel_feedback import QUANTUM, MultilevelFeedbackQueue
from chairlift.core.queues.paced_queue import PacedQueue
from chairlift.core.queues.prefix_fair_queue import PrefixFairQueue
from chairlift.core.queues.request_queue import PriorityQueue, RequestQueue
from chairlift.core.queues.shortest_remaining import ShortestRemainingQueue


def make_queue(config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> RequestQueue:
    """Create an empty queue with the policy that `config.scheduling_policy` names, and with pacing if it is on."""
    num_cached_tokens = kv_cache_manager.num_cached_tokens
    policies: dict[str, Callable[[], RequestQueue]] = {
        "fcfs": RequestQueue,
        "priority": PriorityQueue,
        "fair": lambda: FairQueue(config.tenant_weights),
        "srpt": ShortestRemainingQueue,
        "mlfq": lambda: MultilevelFeedbackQueue(max(1, min(QUANTUM, config.max_model_len // 4))),
        "dlpm": lambda: PrefixFairQueue(config.tenant_weights, num_cached_tokens),
        "edf": lambda: EarliestDeadlineQueue(config.step_time, config.max_num_batched_tokens, num_cached_tokens),
    }
    queue = policies[config.scheduling_policy]()
    speed = config.pacing_tokens_per_second
    return queue if speed is None else PacedQueue(queue, speed)
