"""PreparedEngine: what distinguishes engines of different kinds of models; all else is built by `build_engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift.config import SchedulerConfig
from chairlift.core.engine_core import Executor
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.worker.disk_block_store import DiskBlockStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEngine:
    """The KV memory, the limits and the executor of an engine.

    Attributes:
        max_request_slots: maximum number of slots that the pool can allocate to one request.
        token_bytes, slot_bytes: bytes of K and V of one token in all layers, and in the layers of one group.
        describe: returns the lines about memory and capacity for the log.
    """

    limits: SchedulerConfig
    kv_cache_plan: KVCachePlan
    manager: KVCacheManager
    runner: Executor
    max_request_slots: int
    describe: Callable[[], list[str]]
    has_prefix_cache: bool = False
    token_bytes: int = 0
    slot_bytes: int = 0
    block_stores: Sequence[DiskBlockStore] = ()
