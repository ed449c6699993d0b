"""Paged KV memory whose prefix cache is extended by stores outside of the pool, such as a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chairlift.core.kv.copying_kv_cache import CopyingKVCacheManager
from chairlift.core.kv.hybrid_kv_cache import HybridKVCacheManager
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.request import Request


class BlockStore(Protocol):
    """Keeps the contents of full blocks by their hashes (see `prefix_cache.block_hash`), or those of checkpoints by the
    hashes of the blocks before them.

    It reads and writes their memory itself. It is called while no step is computed.
    """

    def save(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Keep the contents of these blocks. It may keep none, and takes little time."""

    def num_stored(self, hashes: Sequence[bytes]) -> int:
        """The number of blocks, the first ones, that `load` may read at a time."""

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], start: int, num_tokens: int | None = None) -> int:
        """Write contents into blocks; returns the number of blocks, the first ones, that were written.

        The contents are those that were saved with this hash, or nothing is written. Blocks that take longer to load
        than to compute are not loaded.

        Args:
            start: the position of the first token that has to be computed if nothing is loaded.
            num_tokens: the number of such tokens; None for those of the blocks.
        """


class StoredKVCacheManager(CopyingKVCacheManager):
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


class StoredHybridKVCacheManager(HybridKVCacheManager):
    """Saves the blocks and checkpoints of finished requests, and loads prefixes that end at a checkpoint.

    Args:
        block_store, checkpoint_store: keep the blocks and the checkpoints.
    """

    _prefix_cache: PrefixCache

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        plan: CheckpointPlan,
        block_store: BlockStore,
        checkpoint_store: BlockStore,
    ) -> None:
        super().__init__(num_blocks, block_size, True, plan)
        self._block_store = block_store
        self._checkpoint_store = checkpoint_store

    def allocate(self, request: Request) -> int | None:
        num_computed = super().allocate(request)
        if num_computed is None or not _is_stored(request):
            return num_computed
        states, start = self._states[request.request_id], num_computed // self.block_size
        chain = self._prefix_cache.chain(request, (len(request.token_ids) - 1) // self.block_size)
        end = start + self._block_store.num_stored(chain[start:])
        kept = (key in self.checkpoints or self._checkpoint_store.num_stored([key]) for key in chain[start:end][::-1])
        count = next((end - index for index, is_kept in enumerate(kept) if is_kept), start)
        if count > start:
            source = self._load(request, chain[:count], start)
            if source is None:
                return num_computed
            states.source, self._tables[request.request_id].num_committed = source, count
        states.num_matched = max(states.num_matched, end * self.block_size)
        return count * self.block_size

    def free(self, request: Request) -> None:
        if _is_stored(request):
            self._register(self._states[request.request_id])
            self.commit(request)
            table = self._tables[request.request_id]
            chain = self._prefix_cache.chain(request, table.num_committed)
            self._block_store.save(chain, table.block_ids[: len(chain)])
            slots = {key: slot for key in reversed(chain) if (slot := self.checkpoints.find(key)) is not None}
            self._checkpoint_store.save(list(slots), list(slots.values()))
        super().free(request)

    def _load(self, request: Request, chain: list[bytes], start: int) -> int | None:
        """Load the blocks from `start` on and the checkpoint after the last one; None if one of them is not loaded."""
        key, num_blocks = chain[-1], len(chain) - start
        cost, first = self._cost(request, len(chain)), start * self.block_size
        is_in_memory = key in self.checkpoints
        slot = self.checkpoints.read(key, cost) if is_in_memory else self.checkpoints.reserve()
        if slot is None:
            return None
        block_ids = self._tables[request.request_id].block_ids
        num_loaded = 0
        if is_in_memory or self._checkpoint_store.load([key], [slot], first, num_blocks * self.block_size):
            num_loaded = self._block_store.load(chain[start:], block_ids[start : len(chain)], first)
        if num_loaded == num_blocks:
            self._prefix_cache.register(request, block_ids, start, len(chain))
            return slot if is_in_memory or self.checkpoints.register(slot, key, cost) else None
        if not is_in_memory:
            self.checkpoints.release(slot)
        return None


def _is_stored(request: Request) -> bool:
    """Whether blocks of the request are kept: those of LoRA adapters are not, because their ids are not the same after
    a restart. Logprobs of a prompt need all of its hidden states."""
    return not request.lora_id and request.sampling_params.prompt_logprobs is None
