"""The prefix cache: finds blocks by a chain of hashes, one for each full block of a request."""

from __future__ import annotations

import hashlib
from array import array

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.kv_groups import NO_BLOCK, KVGroups
from chairlift.request import Request


def block_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """The hash of a block's tokens and of all tokens before them, whose hash is `parent`.

    It is SHA-256, because a collision would show the contents of one request to another.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def root_hash(cache_salt: str | None, lora_id: int = 0) -> bytes:
    """The parent of a request's first block. Requests with different salts hash the same tokens to different values, so
    they neither share blocks nor learn from response times what others have computed. Requests with different LoRA
    adapters compute other keys and values from the same tokens."""
    root = b"" if cache_salt is None else hashlib.sha256(b"cache salt\0" + cache_salt.encode()).digest()
    return root if not lora_id else hashlib.sha256(b"lora\0" + lora_id.to_bytes(8) + root).digest()


def group_hash(block: bytes, group: int) -> bytes:
    """The key of a block of one group in the index of the pool, which has blocks of all groups."""
    return block if group == 0 else block + group.to_bytes(2)


class PrefixCache:
    """Hash chains of the unfinished requests, over the index of a block pool."""

    def __init__(self, pool: BlockPool, groups: KVGroups) -> None:
        self._pool = pool
        self._groups = groups
        self._block_size = groups.block_size
        self._chains: dict[str, list[bytes]] = {}

    def find(self, request: Request, limit: int) -> list[list[int]]:
        """For each group the cached blocks of the longest prefix of the request's tokens, at most `limit` blocks."""
        chain = self._chain(request, limit)[:limit]
        if self._groups.has_windows:
            return self._groups.longest_hit(map(self._find_in_groups, chain))
        prefix: list[int] = []
        for found in map(self._pool.find, chain):
            if found is None:
                break
            prefix.append(found)
        return [prefix]

    def _find_in_groups(self, block: bytes) -> list[int | None]:
        return [self._pool.find(group_hash(block, group)) for group in range(len(self._groups.windows))]

    def register(self, request: Request, tables: list[list[int]], start: int, end: int) -> None:
        """Index the blocks `start` to `end - 1` of the request's tables, which are full and computed."""
        chain = self._chain(request, end)
        for group, block_ids in enumerate(tables):
            for index in range(start, end):
                if (block_id := block_ids[index]) != NO_BLOCK:
                    self._pool.register(block_id, chain[index] if group == 0 else group_hash(chain[index], group))

    def chain(self, request: Request, num_blocks: int) -> list[bytes]:
        """The hashes of the first blocks of the request's tokens."""
        return self._chain(request, num_blocks)[:num_blocks]

    def forget(self, request: Request) -> None:
        """Drop the request's hash chain. Its blocks stay in the index."""
        self._chains.pop(request.request_id, None)

    def _chain(self, request: Request, num_blocks: int) -> list[bytes]:
        chain = self._chains.setdefault(request.request_id, [])
        size = self._block_size
        for index in range(len(chain), num_blocks):
            parent = chain[-1] if chain else root_hash(request.cache_salt, request.lora_id)
            chain.append(block_hash(parent, request.token_ids[index * size : (index + 1) * size]))
        return chain
