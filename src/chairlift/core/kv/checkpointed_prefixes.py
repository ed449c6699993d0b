"""CheckpointedPrefixes: the prefixes of models with recurrent layers, shared where the recurrent state is known too.

    tokens       [ 0 ... 15 ][ 16 ... 31 ][ 32 ... 47 ][ 48 ...        a request whose first 48 tokens have K and V
    K, V              x             x            x
    checkpoints                     x                                 its hit: 32 tokens; it writes a checkpoint at 48

The state of a running request is in a slot of the worker, which replaces it in each step. Checkpoints are copies of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.block_tables import BlockTables
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.core.kv.prefix_source import PrefixSource, num_full_blocks
from chairlift.core.kv.state_checkpoints import CheckpointPlan, StateCheckpoints
from chairlift.core.kv.stored_prefixes import BlockStore, is_stored
from chairlift.outputs import SchedulerOutput
from chairlift.request import Request


@dataclass(slots=True)
class SequenceStates:
    """The checkpoints of a running request.

    Attributes:
        source: the checkpoint that its state was read from when it was admitted; None for the zero state.
        num_matched: the number of its tokens of which other requests had K and V when it was admitted.
        written: (position, slot) of checkpoints that are not in the index yet.
        last: the key of its last checkpoint within the output, which the next one replaces.
    """

    tables: BlockTables
    source: int | None
    num_matched: int
    written: list[tuple[int, int]] = field(default_factory=list)
    last: bytes | None = None


@dataclass(frozen=True, slots=True)
class PrefixStores:
    """Keep the blocks and the checkpoints of finished requests outside of the memory of the engine."""

    blocks: BlockStore
    checkpoints: BlockStore


class CheckpointedPrefixes(PrefixSource):
    """Finds the longest prefix with a checkpoint, and plans the checkpoints of each step.

    Checkpoints are written at the last block border of a prompt, at the last one of the output (which replaces the one
    before), where a request stops to match cached blocks, and every `CheckpointPlan.interval` tokens. They are indexed
    at the start of the next step, and lost together with the block that they follow.
    """

    def __init__(
        self, cache: PrefixCache, pool: BlockPool, block_size: int, plan: CheckpointPlan, stores: PrefixStores | None
    ) -> None:
        assert plan.interval > 0
        assert plan.interval % block_size == 0
        self.checkpoints = StateCheckpoints(plan.num_slots)
        self._cache, self._pool, self._stores = cache, pool, stores
        self._block_size, self._interval = block_size, plan.interval
        self._num_matched: dict[str, int] = {}
        self._states: dict[str, SequenceStates] = {}
        self._unregistered: dict[str, SequenceStates] = {}
        self._swapped: dict[str, tuple[int, int]] = {}
        pool.index_listeners.append(self._record_index_change)

    @property
    def version(self) -> int:
        return self.checkpoints.version

    @property
    def num_checkpoints(self) -> int:  # type: ignore[override]
        return self.checkpoints.num_used

    @property
    def num_evicted_checkpoints(self) -> int:  # type: ignore[override]
        return self.checkpoints.num_evicted

    def checkpoint(self, request: Request) -> int | None:
        return self._states[request.request_id].source

    def num_matched_tokens(self, request: Request) -> int:
        return self._states[request.request_id].num_matched

    def find(self, request: Request, limit: int) -> list[list[int]]:
        (block_ids,) = self._cache.find(request, limit)
        self._num_matched[request.request_id] = len(block_ids) * self._block_size
        return [block_ids[: self._last_checkpoint(request, len(block_ids))]]

    def expect(self, request: Request) -> None:
        self._cache.expect(request)

    def attach(self, tables: BlockTables) -> None:
        """Read the checkpoint at the end of the shared or swapped prefix, or load a longer one with its checkpoint."""
        self._cache.attach(tables)
        request = tables.request
        self._restore(tables)
        source: int | None = None
        if count := tables.num_committed:
            source = self.checkpoints.read(self._key(request, count), self._cost(request, count))
        states = SequenceStates(tables, source, self._num_matched.pop(request.request_id, 0))
        self._states[request.request_id] = states
        if self._stores is not None and is_stored(request):
            self._extend(states, self._stores)

    def commit(self, tables: BlockTables) -> None:
        self._cache.commit(tables)

    def detach(self, tables: BlockTables) -> None:
        states = self._states.pop(tables.request.request_id)
        self._unregistered.pop(tables.request.request_id, None)
        self._register(states)
        for _, slot in states.written:
            self.checkpoints.release(slot)
        self._cache.detach(tables)
        if self._stores is not None and is_stored(tables.request):
            chain = self._cache.chain(tables.request, tables.num_committed)
            self._stores.blocks.save(chain, tables.block_ids[0][: len(chain)])
            slots = {key: kept for key in reversed(chain) if (kept := self.checkpoints.find(key)) is not None}
            self._stores.checkpoints.save(list(slots), list(slots.values()))

    def forget(self, request: Request) -> None:
        self._cache.forget(request)
        self._num_matched.pop(request.request_id, None)
        if (swapped := self._swapped.pop(request.request_id, None)) is not None:
            self.checkpoints.release(swapped[1])

    # -- swapping ------------------------------------------------------------------------------------------------

    def num_swappable_tokens(self, tables: BlockTables) -> int | None:
        return self._num_checkpointed_blocks(tables) * self._block_size or None

    def record_swap(self, tables: BlockTables) -> None:
        """Keep the last checkpoint, which would otherwise be lost with the block before it."""
        count = self._num_checkpointed_blocks(tables)
        self._swapped[tables.request.request_id] = count, self.checkpoints.take(self._key(tables.request, count))

    def _num_checkpointed_blocks(self, tables: BlockTables) -> int:
        return self._last_checkpoint(tables.request, num_full_blocks(tables, self._block_size))

    def _restore(self, tables: BlockTables) -> None:
        """Index the checkpoint of a swapped request, and the blocks before it, which are copied back in this step."""
        if (swapped := self._swapped.pop(tables.request.request_id, None)) is None:
            return
        count, slot = swapped
        if count > tables.num_committed:
            self._cache.register(tables, count)
        self.checkpoints.register(slot, self._key(tables.request, count), self._cost(tables.request, count))

    # -- stores --------------------------------------------------------------------------------------------------

    def _extend(self, states: SequenceStates, stores: PrefixStores) -> None:
        """Load the longest stored prefix that ends at a checkpoint, if it is longer than the shared one."""
        request, start = states.tables.request, states.tables.num_committed
        chain = self._cache.chain(request, (len(request.token_ids) - 1) // self._block_size)
        end = start + stores.blocks.num_stored(chain[start:])
        kept = (key in self.checkpoints or stores.checkpoints.num_stored([key]) for key in chain[start:end][::-1])
        count = next((end - index for index, is_kept in enumerate(kept) if is_kept), start)
        if count > start:
            source = self._load(states.tables, chain[:count], stores)
            if source is None:
                return
            states.source = source
        states.num_matched = max(states.num_matched, end * self._block_size)

    def _load(self, tables: BlockTables, chain: list[bytes], stores: PrefixStores) -> int | None:
        """Load the uncommitted blocks of a prefix and the checkpoint after the last one; None if one is not loaded."""
        key, start, num_blocks = chain[-1], tables.num_committed, len(chain) - tables.num_committed
        cost, first = self._cost(tables.request, len(chain)), start * self._block_size
        is_in_memory = key in self.checkpoints
        slot = self.checkpoints.read(key, cost) if is_in_memory else self.checkpoints.reserve()
        if slot is None:
            return None
        num_loaded = 0
        if is_in_memory or stores.checkpoints.load([key], [slot], first, num_blocks * self._block_size):
            num_loaded = stores.blocks.load(chain[start:], tables.block_ids[0][start : len(chain)], first)
        if num_loaded < num_blocks:
            if not is_in_memory:
                self.checkpoints.release(slot)
            return None
        self._cache.register(tables, len(chain))
        if not is_in_memory:
            is_new = self.checkpoints.register(slot, key, cost)
            assert is_new, "a key is looked up before it is loaded"
        return slot

    # -- checkpoints of running requests -------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Index the checkpoints that the last steps have written, if all of their tokens are known."""
        self.checkpoints.begin_step()
        unregistered, self._unregistered = self._unregistered, {}
        for request_id, states in unregistered.items():
            self._register(states)
            if states.written:
                self._unregistered[request_id] = states

    def plan_step(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        size = self._block_size
        for request, count in zip(requests, output.num_scheduled_tokens.values(), strict=True):
            end = request.num_computed_tokens
            if (end - count) // size != end // size:
                self._plan(output, request, end - count, end)

    def plan_draft_checkpoints(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Add a checkpoint at the first block border among the draft tokens of each request.

        It takes the slot that the request would take when it reaches the border without draft tokens.
        """
        for request in requests:
            start = request.num_computed_tokens
            border = start - start % self._block_size + self._block_size
            if border <= start + output.num_drafts(request.request_id):
                self._plan(output, request, start, border)

    def _plan(self, output: SchedulerOutput, request: Request, start: int, end: int) -> None:
        """Add the checkpoints of a request after `start` and up to `end` to the output of a step."""
        states = self._states[request.request_id]
        written = self._reserve(states, self._positions(states, start, end))
        if written:
            states.written += written
            self._unregistered[request.request_id] = states
            output.checkpoints.setdefault(request.request_id, []).extend(written)

    def _positions(self, states: SequenceStates, start: int, end: int) -> list[int]:
        """The positions after `start` and up to `end` at which to write checkpoints, the most useful ones first."""
        request, interval = states.tables.request, self._interval
        last = end - end % self._block_size if end >= request.num_prompt_tokens else 0
        multiples = range(end - end % interval, start, -interval)
        positions = (last, self._prompt_end(request), states.num_matched, *multiples)
        return [position for position in dict.fromkeys(positions) if start < position <= end]

    def _reserve(self, states: SequenceStates, positions: list[int]) -> list[tuple[int, int]]:
        """Reserve a slot for each position that has no checkpoint, as long as there are slots; in ascending order."""
        request, written = states.tables.request, []
        for position in positions:
            if (
                position <= len(request.token_ids)
                and self._key(request, position // self._block_size) in self.checkpoints
            ):
                continue
            slot = self.checkpoints.reserve()
            if slot is None:
                break
            written.append((position, slot))
        return sorted(written)

    def _register(self, states: SequenceStates) -> None:
        """Index the written checkpoints whose tokens are known and computed, and whose block is in the prefix cache.

        A checkpoint at a position that is not computed follows a rejected draft token.
        """
        if not states.written:
            return
        request = states.tables.request
        self._cache.commit(states.tables)
        unknown = []
        for position, slot in states.written:
            if position > request.num_computed_tokens:
                self.checkpoints.release(slot)
                continue
            if position > len(request.token_ids):
                unknown.append((position, slot))
                continue
            count = position // self._block_size
            key = self._key(request, count)
            if self._pool.find(key) is None:
                self.checkpoints.release(slot)
            elif self.checkpoints.register(slot, key, self._cost(request, count)) and self._is_output(states, position):
                if states.last is not None:
                    self.checkpoints.discard(states.last)
                states.last = None if position % self._interval == 0 else key
        states.written = unknown

    def _is_output(self, states: SequenceStates, position: int) -> bool:
        return position > self._prompt_end(states.tables.request) and position != states.num_matched

    def _prompt_end(self, request: Request) -> int:
        """The last block border in a prompt that leaves a token to compute, so that the same prompt can continue it."""
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size

    def _last_checkpoint(self, request: Request, num_blocks: int) -> int:
        """The number of blocks before the last checkpoint in the first `num_blocks` blocks; 0 if there is none."""
        chain = self._cache.chain(request, num_blocks)
        return next((count for count in range(num_blocks, 0, -1) if chain[count - 1] in self.checkpoints), 0)

    def _cost(self, request: Request, num_blocks: int) -> int:
        """The tokens between a checkpoint after `num_blocks` blocks and the one before it."""
        return (num_blocks - self._last_checkpoint(request, num_blocks - 1)) * self._block_size

    def _key(self, request: Request, num_blocks: int) -> bytes:
        return self._cache.chain(request, num_blocks)[-1]

    def _record_index_change(self, block_hash: bytes, is_added: bool) -> None:
        if not is_added:
            self.checkpoints.drop(block_hash)
