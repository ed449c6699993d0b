"""Selects the batching policy and the KV cache manager that the options `--batching` and `--kv` name."""

from __future__ import annotations

from chairlift.config import SchedulerConfig
from chairlift.core.baselines.arena import ARENAS
from chairlift.core.baselines.reservations import RESERVATIONS, ReservationKVCacheManager
from chairlift.core.baselines.static_batching import StaticBatching
from chairlift.core.continuous_batching import ContinuousBatching
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.core.scheduler import Scheduler
from chairlift.errors import ConfigError
from chairlift.events import EventSink


def make_scheduler(
    config: SchedulerConfig, kv_cache_manager: KVCacheManager, events: EventSink | None = None
) -> Scheduler:
    """Create a scheduler with the batching policy that `config.batching` names."""
    batching = StaticBatching if config.batching == "static" else ContinuousBatching
    return Scheduler(config, kv_cache_manager, events, batching)


def max_request_slots(kv: str, *, num_blocks: int, block_size: int, arena: str = "buddy") -> int:
    """The maximum number of slots that one request can hold: the pool, or the largest piece of the arena."""
    if kv == "paged":
        return num_blocks * block_size
    return ARENAS[arena](num_blocks).largest_piece * block_size


def make_kv_cache_manager(
    kv: str,
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    enable_prefix_caching: bool = True,
    arena: str = "buddy",
) -> KVCacheManager:
    """Create the manager of a KV policy (see `config.KV_POLICIES`) and an arena (see `config.KV_ARENAS`).

    Raises:
        ConfigError: the arena cannot reserve `max_model_len` slots for even one request under kv=max.
    """
    if kv == "paged":
        return PagedKVCacheManager(num_blocks, block_size, enable_prefix_caching)
    blocks = ARENAS[arena](num_blocks)
    needed = -(-max_model_len // block_size)
    if kv == "max" and needed > blocks.largest_piece:
        raise ConfigError(
            f"kv=max reserves max_model_len={max_model_len} slots = {needed} consecutive blocks of {block_size} for "
            f"each request, and the largest piece of the {arena} arena of {num_blocks} blocks has "
            f"{blocks.largest_piece}: lower max_model_len, or enlarge the pool"
        )
    return ReservationKVCacheManager(blocks, block_size, max_model_len, RESERVATIONS[kv])
