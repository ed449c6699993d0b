"""The kinds of memory, counted slot by slot, for comparison with the formulas of the accounting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from chairlift.core.kv.block_tables import NO_BLOCK
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.request import Request

RANKS = ("token_states", "reserved", "internal")


def kind_for_holder(request: Request, position: int) -> str:
    """The kind of the slot at `position` of the table of this holder."""
    if request.finish_reason is not None:
        return "internal"
    if position < request.num_computed_tokens:
        return "token_states"
    return "reserved" if position < request.max_total_tokens - 1 else "internal"


def slot_census(manager: Any, running: Iterable[Request], head_lacks_memory: bool) -> dict[str, int]:
    """The number of slots of each kind. A slot with several holders has the kind that comes first in RANKS."""
    holders: dict[int, list[str]] = {}
    for request in running:
        if manager.num_held_slots(request) == 0:
            continue
        for table in manager.block_tables(request):
            for index, block_id in enumerate(table):
                for offset in range(manager.block_size if block_id != NO_BLOCK else 0):
                    slot = block_id * manager.block_size + offset
                    kind = kind_for_holder(request, index * manager.block_size + offset)
                    holders.setdefault(slot, []).append(kind)
    counts: Counter[str] = Counter()
    for slot in range(manager.num_blocks * manager.block_size):
        if slot in holders:
            counts[min(holders[slot], key=RANKS.index)] += 1
        elif is_free(manager, slot // manager.block_size):
            counts["external" if head_lacks_memory else "free"] += 1
        else:
            counts["external"] += 1
    counts["shared"] = sum(len(kinds) > 1 for kinds in holders.values())
    counts["saved"] = sum(len(kinds) - 1 for kinds in holders.values())
    return {kind: counts[kind] for kind in (*RANKS, "external", "free", "shared", "saved")}


def is_free(manager: Any, block_id: int) -> bool:
    if isinstance(manager, PagedKVCacheManager):
        return manager.pool.is_free(block_id)
    return not any(table.piece.start <= block_id < sum(table.piece) for table in manager._tables.values())
