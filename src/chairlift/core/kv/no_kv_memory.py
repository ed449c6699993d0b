"""NoKVMemory: the manager of models whose requests need no KV memory, because each is computed in one step."""

from __future__ import annotations

from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryDemand, TableChange
from chairlift.request import Request


class NoKVMemory(KVCacheManager):
    """A pool without blocks, which every request fits in."""

    version = 0
    num_free_blocks = 0

    def __init__(self) -> None:
        super().__init__(num_blocks=0, block_size=1)

    def check_fits(self, request: Request) -> None:
        """Do nothing: every request fits."""

    def demand(self, request: Request) -> MemoryDemand:
        return MemoryDemand(0, 0, 0, 0)

    def allocate(self, request: Request) -> bool:
        request.num_slots = request.num_tokens  # so that the scheduler does not call `grow`
        return True

    def grow(self, request: Request, num_slots: int) -> TableChange | None:
        return TableChange([[]], [])

    def free(self, request: Request) -> None:
        request.num_slots = 0

    def block_tables(self, request: Request) -> list[list[int]]:
        return [[]]

    def worst_case_blocks(self, request: Request) -> int:
        return 0

    def num_written_slots(self, request: Request) -> int:
        return 0
