"""The sources of prefixes without a prefix cache: none, or the siblings of a request."""

from __future__ import annotations

from chairlift.core.kv.block_tables import NO_BLOCK, BlockTables
from chairlift.core.kv.kv_groups import KVGroups
from chairlift.core.kv.prefix_source import PrefixSource, num_full_blocks
from chairlift.request import Request


class NoPrefixes(PrefixSource):
    """Finds nothing, for models whose recurrent state would be needed as well."""

    def find(self, request: Request, limit: int) -> list[list[int]]:
        return [[]]

    def commit(self, tables: BlockTables) -> None:
        return

    def num_swappable_tokens(self, tables: BlockTables) -> None:
        return None


class LeaderPrefixes(PrefixSource):
    """Finds the blocks of the leader's prompt, as long as the leader runs."""

    def __init__(self, groups: KVGroups) -> None:
        self._groups = groups
        self._tables: dict[str, BlockTables] = {}

    def find(self, request: Request, limit: int) -> list[list[int]]:
        tables = self._tables.get(request.leader_id) if request.leader_id is not None else None
        if tables is None or not _have_equal_prompts(tables.request, request):
            return [[] for _ in self._groups.windows]
        limit = min(limit, tables.num_committed, request.num_prompt_tokens // self._groups.block_size)
        columns = zip(*(block_ids[:limit] for block_ids in tables.block_ids), strict=True)
        return self._groups.longest_hit([None if block == NO_BLOCK else block for block in each] for each in columns)

    def attach(self, tables: BlockTables) -> None:
        self._tables[tables.request.request_id] = tables

    def commit(self, tables: BlockTables) -> None:
        tables.num_committed = max(tables.num_committed, num_full_blocks(tables, self._groups.block_size))

    def detach(self, tables: BlockTables) -> None:
        self._tables.pop(tables.request.request_id, None)

    def forget(self, request: Request) -> None:
        if request.finish_reason is not None:
            self._tables.pop(request.request_id, None)


def _have_equal_prompts(leader: Request, request: Request) -> bool:
    if (leader.cache_salt, leader.lora_id) != (request.cache_salt, request.lora_id):
        return False
    length = request.num_prompt_tokens
    return leader.token_ids[:length] == request.token_ids[:length]
