"""A larger pool or a smaller `max_tokens` that would have admitted a waiting request, checked with the memory managers
of the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from chairlift.core.factory import KVPool, make_kv_cache_manager
from chairlift.core.kv.held_memory import hold
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.engine.explanation.queue_position import request_of_size
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, RequestArrived
from chairlift.observability.queue_timeline import BlockHolder
from chairlift.policy_class import is_paged
from chairlift.request import Request

MEMORY_REASONS: Final = frozenset({"memory", "preemption"})

MAX_AHEAD: Final = 64
"""Behind a longer queue nothing is checked, to limit the time of the computation."""


class RequestSize(NamedTuple):
    """The lengths of a request.

    Attributes:
        num_computed: number of tokens that have K and V.
        needed: number of blocks that it needs, if an event contained it.
    """

    arrived: RequestArrived
    num_computed: int = 0
    needed: int | None = None


@dataclass(frozen=True, slots=True)
class BlockedRequest:
    """A request with the state of the engine when it was not admitted for the first time.

    Attributes:
        holders: the running requests.
        ahead: the requests before it in the queue.
        free_blocks, largest_free_piece: the state of the pool. For a static batch, what remains if all of its requests
            reach their maximum lengths.
    """

    started: EngineStarted
    reason: str
    request: RequestSize
    holders: Sequence[BlockHolder]
    ahead: Sequence[RequestSize]
    num_running: int
    free_blocks: int
    largest_free_piece: int

    @property
    def queue(self) -> list[RequestSize]:
        """The requests ahead, and the request itself."""
        return [*self.ahead, self.request]

    def fits(self, num_blocks: int) -> bool:
        """Whether a pool that contains the batch has space for the queue.

        The batch is allocated anew, so gaps from fragmentation and shared prefixes are not taken into account.
        """
        try:
            manager = _kv_cache_manager(self.started, num_blocks)
        except ConfigError:  # The pool is smaller than one reservation of kv=max.
            return False
        members = [RequestSize(holder.arrived, holder.num_computed) for holder in self.holders]
        requests = [_request(size, index) for index, size in enumerate((*members, *self.queue))]
        return all(hold(manager, request, request.num_tokens) for request in requests)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change, and whether it would have admitted a request.

    Attributes:
        changes: `num_kv_blocks` of the engine or `max_tokens` of the request -> value.
        text: one sentence with the result.
    """

    changes: Mapping[str, int]
    admits: bool
    text: str


def what_ifs(blocked: BlockedRequest) -> list[WhatIf]:
    """The changes that apply; none if the request did not wait for memory."""
    if blocked.reason not in MEMORY_REASONS or len(blocked.ahead) > MAX_AHEAD:
        return []
    return [change for change in (_larger_pool(blocked), _smaller_max_tokens(blocked)) if change is not None]


def _option(name: str, value: int, admits: bool) -> WhatIf:
    return WhatIf({name: value}, admits, f"{name}={value} would {'' if admits else 'not '}have admitted it")


def _larger_pool(blocked: BlockedRequest) -> WhatIf | None:
    """The smallest pool that would have admitted the request and those ahead of it; None if they lack seats too."""
    started = blocked.started
    seats = started.max_num_seqs if started.static_batch_size is None else started.static_batch_size
    if blocked.num_running + len(blocked.queue) > seats:
        return None
    num_blocks = _min_num_blocks(blocked)
    if num_blocks > started.num_blocks:
        return _option("num_kv_blocks", num_blocks, True)
    if blocked.reason != "memory":
        return None
    text = f"num_kv_blocks={started.num_blocks} without fragmentation would have admitted it"
    return WhatIf({"num_kv_blocks": started.num_blocks}, True, text)


def _min_num_blocks(blocked: BlockedRequest) -> int:
    """The smallest pool with space for the batch and the queue."""
    started = blocked.started
    needed = sum(_needed_blocks(started, blocked.queue))
    if is_paged(started.kv) or started.batching == "static":
        return started.num_blocks + max(0, needed - blocked.free_blocks)
    sizes = range(1, 2 * (started.num_blocks + needed) + 1)
    return bisect_left(sizes, True, key=blocked.fits) + 1


def _needed_blocks(started: EngineStarted, sizes: Iterable[RequestSize]) -> list[int]:
    """The number of blocks that each request needs: from its event if that has it, otherwise as in an empty pool."""
    manager = _kv_cache_manager(started, started.num_blocks)

    def needed(size: RequestSize) -> int:
        if size.needed is not None:
            return size.needed
        if started.batching == "static":
            return manager.worst_case_blocks(_request(size))
        return manager.demand(_request(size)).needed

    return [needed(size) for size in sizes]


def _smaller_max_tokens(blocked: BlockedRequest) -> WhatIf | None:
    """The largest `max_tokens` that would have admitted the request; None if `max_tokens` has no influence."""
    started, size = blocked.started, blocked.request
    if blocked.ahead or started.kv == "max":
        return None
    if is_paged(started.kv) and started.batching != "static":
        text = "a smaller max_tokens would not have admitted it: paged blocks are allocated on demand"
        return WhatIf({"max_tokens": 1}, False, text)
    limit = blocked.free_blocks if is_paged(started.kv) else blocked.largest_free_piece
    lengths = range(1, size.arrived.max_tokens)
    fitting = bisect_left(
        lengths, True, key=lambda tokens: _needed_blocks(started, [_shortened(size.arrived, tokens)])[0] > limit
    )
    return _option("max_tokens", fitting or 1, fitting > 0)


def _shortened(arrived: RequestArrived, max_tokens: int) -> RequestSize:
    output_len = None if arrived.output_len is None else min(arrived.output_len, max_tokens)
    return RequestSize(replace(arrived, max_tokens=max_tokens, output_len=output_len))


# -- the memory managers -------------------------------------------------------------------------------------------


def _kv_cache_manager(started: EngineStarted, num_blocks: int) -> KVCacheManager:
    kv, block_size, max_model_len = started.kv, started.block_size, started.max_model_len
    arena = started.kv_arena or "buddy"
    if is_paged(kv):
        windows, max_chunk = tuple(started.kv_windows), started.max_num_batched_tokens
        return make_kv_cache_manager(KVPool(num_blocks, block_size, max_model_len, kv, arena, windows, max_chunk))
    # A block of a reservation has the layers of all groups.
    num_blocks = max(1, started.num_blocks_of_all_layers(num_blocks))
    return make_kv_cache_manager(KVPool(num_blocks, block_size, max_model_len, kv, arena))


def _request(size: RequestSize, index: int = 0) -> Request:
    arrived = size.arrived
    return request_of_size(replace(arrived, request_id=str(index)), max(arrived.num_prompt_tokens, size.num_computed))
