"""Fills a KV pool with requests that have reached a length, to count how many of them it holds."""

from __future__ import annotations

from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.kv.windowed_kv_cache import WindowedKVCacheManager
from chairlift.request import Request


def hold(manager: KVCacheManager, request: Request, num_tokens: int) -> bool:
    """Allocate what a request holds when it has `num_tokens` tokens; False if memory is short."""
    if manager.allocate(request) is None:
        return False
    if isinstance(manager, WindowedKVCacheManager):
        return manager.grow_in_chunks(request, num_tokens)
    return request.num_slots >= num_tokens or manager.grow(request, num_tokens) is not None
