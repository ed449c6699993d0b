"""Selects the order of the queue that the option `--scheduling-policy` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from chairlift.config import SchedulerConfig
from chairlift.core.queues.earliest_deadline import EarliestDeadlineQueue
from chairlift.core.queues.fair_queue import FairQueue
from chairlift.core.queues.multilevel_feedback import QUANTUM, MultilevelFeedbackQueue
from chairlift.core.queues.paced_queue import PacedQueue
from chairlift.core.queues.prefix_fair_queue import PrefixFairQueue
from chairlift.core.queues.request_queue import PriorityQueue, RequestQueue
from chairlift.core.queues.shortest_remaining import ShortestRemainingQueue
from chairlift.policy_class import queue_class
from chairlift.request import Request

QUEUES: Final[dict[str, type[RequestQueue]]] = {
    "fcfs": RequestQueue,
    "priority": PriorityQueue,
    "fair": FairQueue,
    "srpt": ShortestRemainingQueue,
    "mlfq": MultilevelFeedbackQueue,
    "dlpm": PrefixFairQueue,
    "edf": EarliestDeadlineQueue,
}


def make_queue(config: SchedulerConfig, num_cached_tokens: Callable[[Request], int]) -> RequestQueue:
    """Create an empty queue with the policy that `config.scheduling_policy` names, and with pacing if it is on.

    The constructor of a class outside of the package has the arguments of the class here from which it is derived.

    Args:
        num_cached_tokens: the number of tokens of a request that are in the prefix cache.
    """
    arguments: dict[type[RequestQueue], tuple[Any, ...]] = {
        FairQueue: (config.tenant_weights,),
        MultilevelFeedbackQueue: (max(1, min(QUANTUM, config.max_model_len // 4)),),
        PrefixFairQueue: (config.tenant_weights, num_cached_tokens),
        EarliestDeadlineQueue: (config.max_num_batched_tokens, num_cached_tokens),
        RequestQueue: (),
    }
    chosen = QUEUES.get(config.scheduling_policy) or queue_class(config.scheduling_policy)
    queue = chosen(*next(arguments[each] for each in chosen.__mro__ if each in arguments))
    speed = config.pacing_tokens_per_second
    queue = queue if speed is None else PacedQueue(queue, speed)
    queue.set_step_time(config.step_time)
    return queue
