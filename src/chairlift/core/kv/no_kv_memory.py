"""NoKVMemory: the manager of models whose requests need no KV memory, because each is computed in one step."""

from __future__ import annotations

from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryDemand, TableChange
from chairlift.request import Request


class NoKVMemory(KVCacheManager):
    """A pool without blocks, which every request fits in."""

    num_blocks = 0
    block_size = 1
    windows = ()
    version = 0
    num_free_blocks = 0

    def demand(self, request: Request) -> MemoryDemand:
        return MemoryDemand(0, 0, 0, 0)

    def allocate(self, request: Request) -> int:
        request.num_slots = request.num_tokens  # so that the scheduler does not call `grow`
        return 0

    def grow(self, request: Request, num_slots: int) -> TableChange:
        raise AssertionError("a request is computed in one step")

    def free(self, request: Request) -> None:
        request.num_slots = 0

    def block_tables(self, request: Request) -> list[list[int]]:
        return [[]]

    def worst_case_blocks(self, request: Request) -> int:
        return 0

    def num_held_slots(self, request: Request) -> int:
        return 0
