"""Paged KV memory of models with recurrent layers: a prefix is shared where its recurrent state is known as well.

    tokens       [ 0 ... 15 ][ 16 ... 31 ][ 32 ... 47 ][ 48 ...        a request whose first 48 tokens have K and V
    K, V              x             x            x
    checkpoints                     x                                 its hit: 32 tokens; it writes a checkpoint at 48

The state of a running request is in a slot of the worker, which replaces it in each step. Checkpoints are copies of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.core.kv.kv_cache_manager import MemoryCounts
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.core.kv.state_checkpoints import CheckpointPlan, StateCheckpoints
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

    request: Request
    source: int | None
    num_matched: int
    written: list[tuple[int, int]] = field(default_factory=list)
    last: bytes | None = None


class HybridKVCacheManager(PagedKVCacheManager):
    """Shares the longest prefix with a checkpoint, and plans the checkpoints of each step.

    Checkpoints are written at the last block border of a prompt, at the last one of the output (which replaces the one
    before), where a request stops to match cached blocks, and every `CheckpointPlan.interval` tokens. They are indexed
    at the start of the next step, and lost together with the block that they follow.

    Without a prefix cache nothing is shared; siblings compute their prompt themselves.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool, plan: CheckpointPlan) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        assert plan.interval > 0
        assert plan.interval % block_size == 0
        self.checkpoints = StateCheckpoints(plan.num_slots if enable_prefix_caching else 0)
        self.pool.index_listeners.append(self._record_index_change)
        self._interval = plan.interval
        self._states: dict[str, SequenceStates] = {}
        self._unregistered: dict[str, SequenceStates] = {}

    @property
    def version(self) -> int:
        return self.pool.version + self.checkpoints.version

    def counts(self) -> MemoryCounts:
        used, evicted = self.checkpoints.num_used, self.checkpoints.num_evicted
        return super().counts()._replace(num_checkpoints=used, num_evicted_checkpoints=evicted)

    def checkpoint(self, request: Request) -> int | None:
        return self._states[request.request_id].source

    def num_matched_tokens(self, request: Request) -> int:
        return self._states[request.request_id].num_matched

    def allocate(self, request: Request) -> int | None:
        matched = super()._shared_prefix(request) if self._prefix_cache is not None else []
        num_computed = super().allocate(request)
        if num_computed is None:
            return None
        source = None
        if num_computed:
            count = num_computed // self.block_size
            source = self.checkpoints.read(self._key(request, count), self._cost(request, count))
        states = SequenceStates(request, source, len(matched) * self.block_size)
        self._states[request.request_id] = states
        return num_computed

    def free(self, request: Request) -> None:
        states = self._states.pop(request.request_id)
        self._unregistered.pop(request.request_id, None)
        self._register(states)
        for _, slot in states.written:
            self.checkpoints.release(slot)
        super().free(request)

    def begin_step(self) -> list[tuple[Request, list[int]]]:
        """Index the checkpoints that the last steps have written, if all of their tokens are known."""
        self.checkpoints.begin_step()
        unregistered, self._unregistered = self._unregistered, {}
        for request_id, states in unregistered.items():
            self._register(states)
            if states.written:
                self._unregistered[request_id] = states
        return super().begin_step()

    def plan_step(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        if self._prefix_cache is None:
            return
        size = self.block_size
        for request, count in zip(requests, output.num_scheduled_tokens.values(), strict=True):
            end = request.num_computed_tokens
            if (end - count) // size != end // size:
                self._plan(output, request, end - count, end)

    def plan_draft_checkpoints(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Add a checkpoint at the first block border among the draft tokens of each request.

        It takes the slot that the request would take when it reaches the border without draft tokens.
        """
        if self._prefix_cache is None:
            return
        for request in requests:
            start = request.num_computed_tokens
            border = start - start % self.block_size + self.block_size
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
        request, interval = states.request, self._interval
        last = end - end % self.block_size if end >= request.num_prompt_tokens else 0
        multiples = range(end - end % interval, start, -interval)
        positions = (last, self._prompt_end(request), states.num_matched, *multiples)
        return [position for position in dict.fromkeys(positions) if start < position <= end]

    def _reserve(self, states: SequenceStates, positions: list[int]) -> list[tuple[int, int]]:
        """Reserve a slot for each position that has no checkpoint, as long as there are slots; in ascending order."""
        request, written = states.request, []
        for position in positions:
            if (
                position <= len(request.token_ids)
                and self._key(request, position // self.block_size) in self.checkpoints
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
        request = states.request
        self.commit(request)
        unknown = []
        for position, slot in states.written:
            if position > request.num_computed_tokens:
                self.checkpoints.release(slot)
                continue
            if position > len(request.token_ids):
                unknown.append((position, slot))
                continue
            count = position // self.block_size
            key = self._key(request, count)
            if self.pool.find(key) is None:
                self.checkpoints.release(slot)
            elif self.checkpoints.register(slot, key, self._cost(request, count)) and self._is_output(states, position):
                if states.last is not None:
                    self.checkpoints.discard(states.last)
                states.last = None if position % self._interval == 0 else key
        states.written = unknown

    def _is_output(self, states: SequenceStates, position: int) -> bool:
        return position > self._prompt_end(states.request) and position != states.num_matched

    def _prompt_end(self, request: Request) -> int:
        """The last block border in a prompt that leaves a token to compute, so that the same prompt can continue it."""
        return (request.num_prompt_tokens - 1) // self.block_size * self.block_size

    def _shared_prefix(self, request: Request) -> list[int]:
        if self._prefix_cache is None:
            return []
        block_ids = super()._shared_prefix(request)
        return block_ids[: self._last_checkpoint(request, len(block_ids))]

    def _last_checkpoint(self, request: Request, num_blocks: int) -> int:
        """The number of blocks before the last checkpoint in the first `num_blocks` blocks; 0 if there is none."""
        assert self._prefix_cache is not None
        chain = self._prefix_cache.chain(request, num_blocks)
        return next((count for count in range(num_blocks, 0, -1) if chain[count - 1] in self.checkpoints), 0)

    def _cost(self, request: Request, num_blocks: int) -> int:
        """The tokens between a checkpoint after `num_blocks` blocks and the one before it."""
        return (num_blocks - self._last_checkpoint(request, num_blocks - 1)) * self.block_size

    def _key(self, request: Request, num_blocks: int) -> bytes:
        assert self._prefix_cache is not None
        return self._prefix_cache.chain(request, num_blocks)[-1]

    def _record_index_change(self, block_hash: bytes, is_stored: bool) -> None:
        if not is_stored:
            self.checkpoints.drop(block_hash)
