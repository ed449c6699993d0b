"""The memory of a request that is computed up to some length, without computing it."""

from __future__ import annotations

from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.kv.kv_groups import FULL
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.request import Request


def hold(manager: KVCacheManager, request: Request, num_tokens: int) -> bool:
    """Allocate what a request holds when it has `num_tokens` tokens; False if memory is short."""
    if manager.allocate(request) is None:
        return False
    if isinstance(manager, PagedKVCacheManager) and manager.windows != FULL:
        return _grow_in_chunks(manager, request, num_tokens)
    return request.num_slots >= num_tokens or manager.grow(request, num_tokens) is not None


def _grow_in_chunks(manager: PagedKVCacheManager, request: Request, num_tokens: int) -> bool:
    """Grow an admitted request by the largest chunks of its prompt, then by single tokens; False if memory is short.

    Meanwhile no other request computes a chunk, because chunks share the token budget of a step.
    """
    num_computed = request.num_computed_tokens
    while request.num_slots < num_tokens:
        num_computed = request.num_slots
        chunk = max(1, min(request.num_tokens - num_computed, manager.groups.max_chunk))
        if manager.grow(request, num_computed + chunk, num_computed) is None:
            return False
    if num_computed < request.num_tokens:
        manager.grow(request, request.num_tokens, request.num_tokens)  # only releases blocks
    return True
