"""How many requests a KV pool holds at once, under each policy: counted with the managers of the engine itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from chairlift.config import SchedulerConfig
from chairlift.core.baselines.selection import make_kv_cache_manager
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.errors import ConfigError, RequestError
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams

LENGTHS_PER_DRAW: Final = 1000
"""Number of lengths drawn at a time. So many rejected requests in a row end the count."""

FORCED: Final = SamplingParams(temperature=0, ignore_eos=True)
"""Of all requests: policies look at a request's own lengths."""


class RequestLengths(NamedTuple):
    """A request: prompt tokens, output tokens that there will be, and how many it asks for; all at least 1."""

    prompt: int
    output: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class KVPool:
    """A KV pool and the policy over it; fields are those of `EngineConfig`."""

    num_blocks: int
    block_size: int
    max_model_len: int
    kv: str = "paged"
    kv_arena: str = "buddy"

    @property
    def name(self) -> str:
        return self.kv if self.kv == "paged" else f"{self.kv}, {self.kv_arena}"


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """How many requests of given lengths a pool holds.

    Attributes:
        num_fit: requests that the pool holds at their full length, all at the same time.
        num_running: requests that run at once: `num_fit`, or fewer where seats or the static batch end sooner.
        limited_by: what ends `num_running`: "memory", "max_num_seqs" or "static_batch_size".
        num_rejected: requests before the last that fits which could never fit, each refused at the door.
        num_slots_held, num_slots_written: by all `num_fit` at full length; the rest of the pool is free or lost.
        error: the error, if nothing fits.
    """

    pool: KVPool
    num_fit: int
    num_running: int
    limited_by: str
    num_rejected: int = 0
    num_slots_held: int = 0
    num_slots_written: int = 0
    error: str | None = None


def compute_pool_capacity(pool: KVPool, limits: SchedulerConfig, lengths: Iterable[RequestLengths]) -> PoolCapacity:
    """Admit requests in the order given, each grown to its full length, until one does not fit any more.

    Prompts are taken to be distinct: nobody shares a block. P prompt and n output tokens write P + n - 1 slots.

    Under a reservation this is what the engine does, so the next request waits. Paged, nobody who is counted is ever
    preempted, whatever arrives when; one more request may run as well, if others end or are young while it is long.
    Only with equal lengths, arrivals at once, and a token budget for all prompts in one step do all of them reach their
    full length in the same step, and then one more always waits or causes a preemption.

    A static batch sets aside what its members ask for, paged as well.
    """
    try:
        manager = make_empty_manager(pool)
    except ConfigError as error:
        return PoolCapacity(pool, 0, 0, "memory", error=str(error))
    counted = _count(pool, manager, limits.batching == "static", lengths)
    running, limited_by = counted.num_fit, "memory"
    if limits.max_num_seqs < running:
        running, limited_by = limits.max_num_seqs, "max_num_seqs"
    if limits.batching == "static" and limits.static_batch_size < running:
        running, limited_by = limits.static_batch_size, "static_batch_size"
    return PoolCapacity(
        pool=pool,
        num_fit=counted.num_fit,
        num_running=running,
        limited_by=limited_by,
        num_rejected=counted.num_rejected,
        num_slots_held=counted.num_slots_held,
        num_slots_written=counted.num_slots_written,
        error=counted.error if not counted.num_fit else None,
    )


@dataclass(slots=True)
class _Counted:
    num_fit: int = 0
    num_rejected: int = 0
    num_slots_held: int = 0
    num_slots_written: int = 0
    error: str | None = None

    def add(self, length: RequestLengths, num_slots_held: int) -> None:
        self.num_fit += 1
        self.num_slots_written += length.prompt + length.output - 1
        self.num_slots_held += num_slots_held


def _count(pool: KVPool, manager: KVCacheManager, is_static: bool, lengths: Iterable[RequestLengths]) -> _Counted:
    counted = _Counted()
    worst_case = num_rejected = 0
    for length in lengths:
        request = forced_request(counted.num_fit, length)
        if (refusal := rejection_message(request, pool, manager)) is not None:
            num_rejected += 1
            counted.error = refusal
            if num_rejected == LENGTHS_PER_DRAW:
                break
            continue
        worst_case += manager.worst_case_blocks(request)
        num_slots = length.prompt + length.output - 1
        if (is_static and worst_case > pool.num_blocks) or not manager.allocate(request):
            break
        if num_slots > request.num_slots and manager.grow(request, num_slots) is None:
            break
        counted.num_rejected += num_rejected
        num_rejected = 0
        counted.add(length, request.num_slots)
    counted.num_slots_held += manager.num_rounding_blocks * pool.block_size
    return counted


def make_empty_manager(pool: KVPool) -> KVCacheManager:
    """A manager of the empty pool, without a prefix cache."""
    return make_kv_cache_manager(
        pool.kv,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_model_len=pool.max_model_len,
        enable_prefix_caching=False,
        arena=pool.kv_arena,
    )


def rejection_message(request: Request, pool: KVPool, manager: KVCacheManager) -> str | None:
    """Why a pool rejects the request; None if it can run."""
    if request.max_total_tokens > pool.max_model_len:
        return f"{request.max_total_tokens} prompt and output tokens exceed max_model_len={pool.max_model_len}"
    try:
        manager.check_fits(request)
    except RequestError as error:
        return str(error)
    return None


def forced_request(index: int, length: RequestLengths) -> Request:
    """A request that generates exactly `length.output` tokens."""
    return Request(str(index), [0] * length.prompt, FORCED, length.max_tokens, output_len=length.output)
