"""The order in which free blocks are allocated again, which evicts what they contain.

lru             without contents | least recently used ...... most recently used
expected-use    without contents | latest expected use ...... soonest expected use | of waiting requests, last one first

The end of a prefix is evicted before its beginning in both, because no prefix is found without its beginning.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, NamedTuple

from chairlift.core.kv.index_changes import HASH_BYTES
from chairlift.request import FinishReason, Request
from chairlift.sampling_params import LONG_RETENTIONS

PRIOR_RETURNS: Final = 4
"""The weight of the estimate for a more general kind, in returns."""

PRIOR_SECONDS: Final = 1.0
MAX_KINDS: Final = 4096


class ReturnGaps:
    """Estimates the mean idle time for each return of a prefix: the seconds after which that of a finished request is
    used again, learned from those before it. Prefixes that do not return have idle time only."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def record(self, kinds: Sequence[Hashable], idle: float, num_returns: int) -> None:
        """Add the idle time of a prefix, which was used again or given up, to its kinds, general ones first."""
        for kind in reversed(kinds):
            seconds, count = self._seen.pop(kind, (0.0, 0))
            self._seen[kind] = seconds + idle, count + num_returns
        while len(self._seen) > MAX_KINDS:
            self._seen.popitem(last=False)

    def expected(self, kinds: Sequence[Hashable]) -> float:
        """The estimate for the last kind. One that was seen rarely is close to that of the kind before it."""
        mean = PRIOR_SECONDS
        for kind in kinds:
            seconds, count = self._seen.get(kind, (0.0, 0))
            mean = (seconds + PRIOR_RETURNS * mean) / (count + PRIOR_RETURNS)
        return mean


SHORTEST_GAP, LONGEST_GAP = 1.0, 4.0**8
"""The limits of expected gaps, in seconds. They are rounded up to a power of 4. The longest one, of 18 hours, is also
that of the blocks that an aborted request has added."""

IDLE_FACTOR: Final = 4.0
"""A prefix that has been idle for some time is expected after so many times that time, because gaps have long tails."""

MIN_OBSOLETE: Final = 64
"""Obsolete entries of the order of wanted blocks are removed if there are more of them than this and than others."""

MAX_PREFIXES, MAX_IDLE_SECONDS = 1024, 600.0
"""The limits of the finished requests whose continuation is awaited; others are recorded as not continued."""


class EvictionOrder:
    """The free blocks of a pool, which has `num_blocks` free ones at first, least recently used first.

    Attributes:
        now: the time of the last step, in seconds of the engine's clock.
        idle_seconds: how long the contents that were evicted last had been unused.
    """

    def __init__(self, num_blocks: int) -> None:
        self.now = self.idle_seconds = 0.0
        self._free_since = [0.0] * num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, block_id: int, block_hash: bytes | None) -> None:
        """Add a block that has become free; without a hash it is the next one to be taken. The end of a prefix comes
        before its beginning."""
        self._blocks[block_id], self._free_since[block_id] = None, self.now
        if block_hash is None:
            self._blocks.move_to_end(block_id, last=False)

    def remove(self, block_id: int) -> None:
        """Remove a block that is in use again."""
        del self._blocks[block_id]

    def take(self) -> int:
        """Remove and return the block whose contents are evicted next."""
        block_id, _ = self._blocks.popitem(last=False)
        self.idle_seconds = self.now - self._free_since[block_id]
        return block_id

    def expect(self, request: Request, chain: Sequence[bytes]) -> None:
        """Called when a request is queued, with the hashes of its full blocks."""

    def stop_expecting(self, request: Request) -> None:
        """Called when it was admitted, or has ended."""

    def forget(self, request: Request) -> None:
        """Called when it has ended."""

    def finish(self, request: Request, chain: Sequence[bytes]) -> None:
        """Called before the blocks of a finished request are released, with their hashes."""


class _Use(NamedTuple):
    """The expected use of a cached block: seconds after its release, and the last request of the only session that has
    it; None if several have."""

    gap: float
    owner: str | None


class _Prefix(NamedTuple):
    """What a finished request had computed, until another one continues it."""

    request_id: str
    kinds: tuple[object, ...]
    time: float


@dataclass(slots=True)
class _Demand:
    """The number of waiting requests whose prompts have a block, and the rank of the first one."""

    count: int
    rank: tuple[int, int]


class ExpectedUse(EvictionOrder):
    """The block whose next use is expected last is evicted first.

    The next use of the prefix of a waiting request is known: it is its turn in the queue. Others are expected after the
    gap that was learned from requests whose outputs had the same end, such as that of a tool call, and the same
    `prompt_cache_key`; or after IDLE_FACTOR times the time for which they have been idle, if that is longer. Blocks
    with equal gaps are a class, least recently used first, so a choice compares the first blocks of at most 9 classes.
    A block that several sessions have is in the class of the shortest gap, and one that the caller asked to retain in
    the first one.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._gaps = ReturnGaps()
        self._classes: dict[float, OrderedDict[int, float]] = {}
        self._class_of: dict[int, OrderedDict[int, float]] = {}
        self._hashes: dict[int, bytes] = {}
        self._uses: dict[bytes, _Use] = {}
        self._prefixes: OrderedDict[bytes, _Prefix] = OrderedDict()
        self._continued: dict[str, str] = {}
        self._waiting: dict[str, Sequence[bytes]] = {}
        self._demands: dict[bytes, _Demand] = {}
        self._wanted: dict[bytes, tuple[int, int]] = {}
        self._order: list[tuple[tuple[int, int], int, int]] = []
        self._num_wanted = 0

    def __len__(self) -> int:
        return len(self._blocks) + len(self._hashes)

    def __iter__(self) -> Iterator[int]:
        return iter([*self._blocks, *self._hashes])

    def add(self, block_id: int, block_hash: bytes | None) -> None:
        if block_hash is None:
            super().add(block_id, None)
        else:
            self._hashes[block_id], self._free_since[block_id] = block_hash, self.now
            self._classify(block_id, self.now)

    def _classify(self, block_id: int, time: float) -> None:
        use = self._uses.get(self._hashes[block_id][:HASH_BYTES])
        gap = 1.0 if use is None else use.gap
        if (blocks := self._classes.get(gap)) is None:
            blocks = self._classes[gap] = OrderedDict()
        self._class_of[block_id] = blocks
        blocks[block_id] = time

    def remove(self, block_id: int) -> None:
        if block_id in self._blocks:
            super().remove(block_id)
        elif (blocks := self._class_of.pop(block_id, None)) is not None:
            del blocks[block_id], self._hashes[block_id]
        else:
            del self._wanted[self._hashes.pop(block_id)]

    def take(self) -> int:
        if self._blocks:
            return super().take()
        while self._class_of:
            block_id = self._take_latest()
            key = self._hashes[block_id]
            if (demand := self._demands.get(key[:HASH_BYTES])) is None:
                return self._evict(block_id)
            self._num_wanted += 1
            self._wanted[key] = self._num_wanted, block_id
            heappush(self._order, ((-demand.rank[0], -demand.rank[1]), self._num_wanted, block_id))
            if len(self._order) > 2 * len(self._wanted) + MIN_OBSOLETE:
                self._order = sorted(entry for entry in self._order if self._is_wanted(*entry[1:]))
        while True:
            _, number, block_id = heappop(self._order)
            if self._is_wanted(number, block_id):
                del self._wanted[self._hashes[block_id]]
                return self._evict(block_id)

    def _is_wanted(self, number: int, block_id: int) -> bool:
        """Whether an entry of the order of wanted blocks is not obsolete."""
        return self._wanted.get(self._hashes.get(block_id, b"")) == (number, block_id)

    def _take_latest(self) -> int:
        """Remove and return the block with the latest expected use from its class."""
        heads = ((gap, blocks, next(iter(blocks.values()))) for gap, blocks in self._classes.items() if blocks)
        _, _, blocks = max((max(gap, IDLE_FACTOR * (self.now - time)), gap, blocks) for gap, blocks, time in heads)
        block_id, _ = blocks.popitem(last=False)
        del self._class_of[block_id]
        return block_id

    def _evict(self, block_id: int) -> int:
        self._uses.pop(self._hashes.pop(block_id), None)
        self.idle_seconds = self.now - self._free_since[block_id]
        return block_id

    # -- what is known of requests -------------------------------------------------------------------------------

    def expect(self, request: Request, chain: Sequence[bytes]) -> None:
        if request.request_id not in self._continued:
            self._continued[request.request_id] = self._record_return(chain, request.arrival_time)
        self._waiting[request.request_id] = chain = tuple(chain)  # The list of a request grows while it waits.
        rank = request.priority, request.arrival_index
        for block in chain:
            if (demand := self._demands.get(block)) is None:
                self._demands[block] = _Demand(1, rank)
            else:
                demand.count, demand.rank = demand.count + 1, min(demand.rank, rank)

    def _record_return(self, chain: Sequence[bytes], now: float) -> str:
        """Record that the longest known prefix of a chain is used again; returns its request, or an empty id."""
        while self._prefixes:
            oldest = next(iter(self._prefixes.values()))
            if len(self._prefixes) <= MAX_PREFIXES and now - oldest.time <= MAX_IDLE_SECONDS:
                break
            self._prefixes.popitem(last=False)
            self._gaps.record(oldest.kinds, now - oldest.time, 0)
        found = next((known for block in reversed(chain) if (known := self._prefixes.pop(block, None))), None)
        if found is None:
            return ""
        self._gaps.record(found.kinds, max(0.0, now - found.time), 1)
        return found.request_id

    def stop_expecting(self, request: Request) -> None:
        for block in self._waiting.pop(request.request_id, ()):
            demand = self._demands[block]
            demand.count -= 1
            if not demand.count:
                del self._demands[block]
                if (wanted := self._wanted.pop(block, None)) is not None:
                    self._classify(wanted[1], -math.inf)
                    self._class_of[wanted[1]].move_to_end(wanted[1], last=False)

    def forget(self, request: Request) -> None:
        self.stop_expecting(request)
        self._continued.pop(request.request_id, None)

    def finish(self, request: Request, chain: Sequence[bytes]) -> None:
        if request.finish_reason is FinishReason.ABORT:
            for block in chain:
                self._uses.setdefault(block, _Use(LONGEST_GAP, None))
            return
        before, params = self._continued.get(request.request_id), request.sampling_params
        ending = tuple(request.token_ids[-2:])
        kinds = ("", ending, (request.cache_salt, params.prompt_cache_key, ending))
        gap = SHORTEST_GAP if params.prompt_cache_retention in LONG_RETENTIONS else self._gaps.expected(kinds)
        gap = 4.0 ** math.ceil(math.log(min(max(gap, SHORTEST_GAP), LONGEST_GAP), 4))
        own = _Use(gap, request.request_id)
        for block in chain:
            use = self._uses.get(block)
            if use is None or use.owner == before:
                self._uses[block] = own
            else:
                self._uses[block] = _Use(min(use.gap, gap), None)
        if chain:
            self._prefixes[chain[-1]] = _Prefix(request.request_id, kinds, self.now)


EVICTION_ORDERS: Final[dict[str, type[EvictionOrder]]] = {"expected-use": ExpectedUse, "lru": EvictionOrder}
"""The orders of `EngineConfig.prefix_cache_eviction_policy`."""
