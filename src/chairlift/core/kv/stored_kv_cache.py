"""Paged KV memory whose prefix cache is extended by a store outside of the pool, such as a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.request import Request


class BlockStore(Protocol):
    """Keeps the contents of full blocks by their hashes (see `prefix_cache.block_hash`).

    It reads and writes the memory of the blocks itself. It is called while no step is computed.
    """

    def save(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Keep the contents of these blocks. It may keep none, and takes little time."""

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], start: int) -> int:
        """Write contents into blocks; returns the number of blocks, the first ones, that were written.

        The contents are those that were saved with this hash, or nothing is written. Blocks that take longer to load
        than to compute are not loaded.

        Args:
            start: the position of the first token of the first block.
        """


class StoredKVCacheManager(PagedKVCacheManager):
    """Saves the blocks of finished requests, and loads prefixes that the pool does not have.

    Args:
        block_store: keeps the blocks.
    """

    _prefix_cache: PrefixCache

    def __init__(self, num_blocks: int, block_size: int, block_store: BlockStore) -> None:
        super().__init__(num_blocks, block_size)
        self._block_store = block_store

    def allocate(self, request: Request) -> int | None:
        num_computed = super().allocate(request)
        if num_computed is None or not _is_stored(request):
            return num_computed
        table = self._tables[request.request_id]
        limit = (len(request.token_ids) - 1) // self.block_size  # at least one token is left to compute
        start = table.num_committed
        if limit > start:
            hashes = self._prefix_cache.chain(request, limit)[start:]
            count = self._block_store.load(hashes, table.block_ids[start:limit], start * self.block_size)
            if count:
                self._prefix_cache.register(request, table.block_ids, start, start + count)
            table.num_committed += count
        return table.num_committed * self.block_size

    def free(self, request: Request) -> None:
        table = self._tables[request.request_id]
        self._commit(table)
        if _is_stored(request):
            hashes = self._prefix_cache.chain(request, table.num_committed)
            self._block_store.save(hashes, table.block_ids[: len(hashes)])
        super().free(request)


def _is_stored(request: Request) -> bool:
    """Whether blocks of the request are kept: those of LoRA adapters are not, because their ids are not the same after
    a restart. Logprobs of a prompt need all of its hidden states."""
    return not request.lora_id and request.sampling_params.prompt_logprobs is None
