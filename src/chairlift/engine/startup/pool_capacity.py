"""Counts how many requests a KV pool holds at the same time under each policy, with the engine's own managers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool, make_kv_cache_manager
from chairlift.core.kv.held_memory import hold
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.errors import ConfigError, RequestError
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams

LENGTHS_PER_DRAW: Final = 1000
"""Number of lengths drawn at a time. So many rejected requests in a row end the count."""

FORCED: Final = SamplingParams(temperature=0, ignore_eos=True)
"""The parameters of all counted requests; their lengths are fields of the request."""


class RequestLengths(NamedTuple):
    """The lengths of a request, each at least 1: prompt tokens, output tokens that it generates, and its max_tokens."""

    prompt: int
    output: int
    max_tokens: int


@dataclass(slots=True)
class PoolCapacity:
    """The number of requests of given lengths that a pool holds.

    Attributes:
        num_fit: requests that the pool holds at their full length, all at the same time.
        num_running: requests that run at the same time: `num_fit`, or fewer if the seats or the static batch limit it.
        limited_by: the limit of `num_running`: "memory", "max_num_seqs" or "static_batch_size".
        num_rejected: requests before the last one that fits which could not run even alone.
        num_slots_held, num_slots_written: slots of all `num_fit` requests at full length, in all groups of layers.
        error: the reason why no request fits.
    """

    pool: KVPool
    num_fit: int = 0
    num_running: int = 0
    limited_by: str = "memory"
    num_rejected: int = 0
    num_slots_held: int = 0
    num_slots_written: int = 0
    error: str | None = None


def compute_pool_capacity(pool: KVPool, limits: SchedulerConfig, lengths: Iterable[RequestLengths]) -> PoolCapacity:
    """Admit requests in the given order, each grown to its full length, until one does not fit.

    Prompts are assumed to be distinct, so no block is shared. P prompt and n output tokens write P + n - 1 slots.

    Under a reservation the engine does the same: the next request waits. Under paging none of the counted requests is
    ever preempted, whatever the arrival times are, and one more request may run while others are short or have
    finished. If lengths are equal, all requests arrive together, and one step has a token budget for all prompts, then
    all reach their full length in the same step, and one more request always waits or causes a preemption.

    With sliding windows, a request is counted with what it holds when it decodes, after its prompt was computed in the
    largest chunks while the others were at their full length. More memory is needed only while several requests compute
    chunks in the same step, and then a request may be preempted.

    A static batch reserves the maximum length of its requests under paging as well.
    """
    try:
        manager = make_kv_cache_manager(pool)
    except ConfigError as error:
        return PoolCapacity(pool, error=str(error))
    capacity = PoolCapacity(pool)
    is_static = limits.batching == "static"
    worst_case = num_rejected = 0
    for length in lengths:
        request = forced_request(capacity.num_fit, length)
        if (message := rejection_message(request, pool, manager)) is not None:
            num_rejected += 1
            capacity.error = message
            if num_rejected == LENGTHS_PER_DRAW:
                break
            continue
        worst_case += manager.worst_case_blocks(request)
        num_slots = length.prompt + length.output - 1
        if (is_static and worst_case > pool.num_blocks) or not hold(manager, request, num_slots):
            break
        capacity.num_rejected += num_rejected
        num_rejected = 0
        capacity.num_fit += 1
        capacity.num_slots_written += num_slots * len(manager.windows) - manager.num_released_slots(request)
        capacity.num_slots_held += manager.num_held_slots(request)
    capacity.num_slots_held += manager.counts().num_rounding_blocks * pool.block_size
    if capacity.num_fit:
        capacity.error = None
    seats = {"max_num_seqs": limits.max_num_seqs}
    if is_static:
        seats["static_batch_size"] = limits.static_batch_size
    capacity.num_running = capacity.num_fit
    for name, limit in seats.items():
        if limit < capacity.num_running:
            capacity.num_running, capacity.limited_by = limit, name
    return capacity


def rejection_message(request: Request, pool: KVPool, manager: KVCacheManager) -> str | None:
    """The reason why the request cannot run even alone; None if it can run."""
    if request.max_total_tokens > pool.max_model_len:
        return f"{request.max_total_tokens} prompt and output tokens exceed max_model_len={pool.max_model_len}"
    try:
        manager.check_fits(request)
    except RequestError as error:
        return str(error)
    return None


def forced_request(index: int, length: RequestLengths) -> Request:
    """Create a request that generates exactly `length.output` tokens."""
    return Request(str(index), [0] * length.prompt, FORCED, length.max_tokens, output_len=length.output)
