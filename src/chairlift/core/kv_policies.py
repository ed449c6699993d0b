"""One switch over all ways to hold KV memory."""

from __future__ import annotations

from chairlift.core.arena import ARENAS
from chairlift.core.kv_cache_manager import KVCacheManager, PagedKVCacheManager
from chairlift.core.reservation import RESERVATIONS, ReservationKVCacheManager
from chairlift.errors import ConfigError


def max_request_slots(kv: str, *, num_blocks: int, block_size: int, arena: str = "buddy") -> int:
    """Slots that one request can hold at most: the pool's, or those of the largest piece of the arena."""
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
    """The manager of a validated policy and arena (see `config.KV_POLICIES`, `config.KV_ARENAS`).

    Raises:
        ConfigError: the arena could not give even one request of `max_model_len` its reservation under "max".
    """
    if kv == "paged":
        return PagedKVCacheManager(num_blocks, block_size, enable_prefix_caching)
    pieces = ARENAS[arena](num_blocks)
    needed = -(-max_model_len // block_size)
    if kv == "max" and needed > pieces.largest_piece:
        raise ConfigError(
            f"kv=max reserves max_model_len={max_model_len} slots = {needed} consecutive blocks of {block_size} for "
            f"each request, and the largest piece that the {arena} arena of {num_blocks} blocks can give has "
            f"{pieces.largest_piece}: lower max_model_len, or enlarge the pool"
        )
    return ReservationKVCacheManager(pieces, block_size, max_model_len, RESERVATIONS[kv])
