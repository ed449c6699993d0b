"""Selects the batching policy and the KV cache manager that the options `--batching` and `--kv` name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.config import SchedulerConfig
from chairlift.core.baselines.arena import ARENAS
from chairlift.core.baselines.reservations import RESERVATIONS
from chairlift.core.baselines.static_batching import StaticScheduler
from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.checkpointed_prefixes import CheckpointedPrefixes, PrefixStores
from chairlift.core.kv.eviction_order import EVICTION_ORDERS
from chairlift.core.kv.index_changes import IndexChangeLog
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.kv.kv_groups import FULL, KVGroups
from chairlift.core.kv.observed_prefixes import ObservedPrefixes
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.core.kv.prefix_source import PrefixSource
from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.core.kv.stored_prefixes import BlockStore, StoredPrefixes
from chairlift.core.kv.uncached_prefixes import LeaderPrefixes, NoPrefixes
from chairlift.core.measuring.scheduler_meter import SchedulerMeter
from chairlift.core.pooling import PoolingScheduler
from chairlift.core.scheduler import Scheduler
from chairlift.core.step_time_correction import StepTimeCorrection
from chairlift.errors import ConfigError
from chairlift.events import EventSink
from chairlift.policy_class import is_class_name, is_fair, is_paged, kv_class


def make_scheduler(
    config: SchedulerConfig, kv_cache_manager: KVCacheManager, events: EventSink | None = None
) -> Scheduler:
    """Create a scheduler for what the model computes, with the batching policy that `config.batching` names."""
    meter = SchedulerMeter(kv_cache_manager, events, is_fair=is_fair(config.scheduling_policy))
    chosen = StaticScheduler if config.batching == "static" else Scheduler
    scheduler = (PoolingScheduler if config.is_pooling else chosen)(config, kv_cache_manager, meter)
    if config.step_time is not None:
        meter.correction = StepTimeCorrection(config.step_time, scheduler.queue.set_step_time)
    return scheduler


@dataclass(frozen=True, slots=True)
class KVPool:
    """A KV pool and its policy, with the field names of `EngineConfig`.

    Attributes:
        windows, max_chunk: see `KVGroups`. Reservations have one group without a window, because they never release a
            slot before their request has finished.
        checkpoints: the checkpoints of a model with recurrent layers, which has one group; None for other models.
        num_swap_blocks: the blocks of the swap space, which needs paged memory in one group without a window.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    kv: str = "paged"
    kv_arena: str = "buddy"
    windows: tuple[int | None, ...] = FULL
    max_chunk: int = 1
    checkpoints: CheckpointPlan | None = None
    num_swap_blocks: int = 0
    prefix_cache_eviction_policy: str = "expected-use"

    def __post_init__(self) -> None:
        assert is_paged(self.kv) or self.windows == FULL, "reservations have one group of layers"
        assert self.checkpoints is None or self.windows == FULL, "layers of models with checkpoints are one group"
        assert not self.num_swap_blocks or self.windows == FULL, "blocks of layers with windows are not swapped"

    @property
    def name(self) -> str:
        return self.kv if is_paged(self.kv) else f"{self.kv}, {self.kv_arena}"

    @property
    def groups(self) -> KVGroups:
        return KVGroups(self.windows, self.block_size, self.max_chunk)

    @property
    def max_request_slots(self) -> int:
        """The maximum number of tokens for which one request can have slots in the pool, or in the largest piece of the
        arena. If windows limit the slots of a request, it is at most `max_model_len`, rounded up to whole blocks."""
        if is_paged(self.kv):
            return self.groups.max_tokens(self.num_blocks, self.max_model_len)
        return ARENAS[self.kv_arena](self.num_blocks).largest_piece * self.block_size


def make_kv_cache_manager(
    pool: KVPool,
    enable_prefix_caching: bool = False,
    block_stores: Sequence[BlockStore] = (),
    *,
    record_index_changes: bool = False,
) -> KVCacheManager:
    """Create the manager of a pool, in which all blocks are free.

    Args:
        block_stores: a store that keeps the blocks of finished requests, and is searched for prefixes that the pool
            does not have, and one for checkpoints if the pool has them; or none. They need a prefix cache.
        record_index_changes: record the changes of the prefix cache; reservations have none.

    Raises:
        ConfigError: the arena cannot reserve `max_model_len` slots for even one request under kv=max.
    """
    if is_paged(pool.kv):
        manager = _make_paged_manager(pool, enable_prefix_caching, block_stores if enable_prefix_caching else ())
        if record_index_changes:
            manager.index_changes = IndexChangeLog()
            manager.pool.index_listeners.append(manager.index_changes.record)
        return manager
    arena = ARENAS[pool.kv_arena](pool.num_blocks)
    needed = -(-pool.max_model_len // pool.block_size)
    if pool.kv == "max" and needed > arena.largest_piece:
        raise ConfigError(
            f"kv=max reserves max_model_len={pool.max_model_len} slots = {needed} consecutive blocks of "
            f"{pool.block_size} for each request, and the largest piece of the {pool.kv_arena} arena of "
            f"{pool.num_blocks} blocks has {arena.largest_piece}: lower max_model_len, or enlarge the pool"
        )
    reserving: KVCacheManager = (RESERVATIONS.get(pool.kv) or kv_class(pool.kv))(
        arena, pool.block_size, pool.max_model_len
    )
    return reserving


def _make_paged_manager(
    pool: KVPool, enable_prefix_caching: bool, block_stores: Sequence[BlockStore]
) -> PagedKVCacheManager:
    blocks = BlockPool(pool.num_blocks, EVICTION_ORDERS[pool.prefix_cache_eviction_policy])
    cache = ObservedPrefixes(blocks, pool.groups) if enable_prefix_caching else None
    prefixes = _make_prefix_source(pool, blocks, cache, block_stores)
    manager: PagedKVCacheManager = (kv_class(pool.kv) if is_class_name(pool.kv) else PagedKVCacheManager)(
        blocks, pool.groups, prefixes, pool.num_swap_blocks
    )
    if cache is not None:
        manager.misses = cache.misses
    return manager


def _make_prefix_source(
    pool: KVPool, blocks: BlockPool, cache: PrefixCache | None, block_stores: Sequence[BlockStore]
) -> PrefixSource:
    groups, plan = pool.groups, pool.checkpoints
    if cache is None:
        return LeaderPrefixes(groups) if plan is None else NoPrefixes()
    if plan is not None:
        stores = PrefixStores(*block_stores) if block_stores else None
        return CheckpointedPrefixes(cache, blocks, pool.block_size, plan, stores)
    return StoredPrefixes(cache, blocks, groups, *block_stores) if block_stores else cache
