"""StateCheckpoints: the slots that keep recurrent states at block borders, for later requests with the same beginning.

    reserve ---> written in this step ---register--> in the index ---evicted, dropped---> free ---> reserve
                        |                                                                  ^
                        +---------------------------release--------------------------------+

A checkpoint has the hash of the last block before it as its key, as K and V of that block have.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

MIN_OBSOLETE: Final = 64
"""Obsolete entries of the eviction order are removed if there are more of them than this and than other entries."""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The checkpoints of a model with recurrent layers.

    Attributes:
        num_slots: number of checkpoints that there is memory for; 0 without a prefix cache.
        interval: tokens between the checkpoints of a long sequence, a multiple of the block size.
    """

    num_slots: int
    interval: int


@dataclass(slots=True)
class _Checkpoint:
    """A checkpoint in the index.

    Attributes:
        cost: the tokens that have to be computed again without it.
        entry: the number of its entry in the eviction order; other entries of its slot are obsolete.
    """

    key: bytes
    slot: int
    cost: int
    entry: int = 0


class StateCheckpoints:
    """Owns `num_slots` slots, and an index of those that are filled.

    If no slot is free, the checkpoint with the lowest priority is evicted: its cost, plus the priority of the last
    evicted one at the time of its last use (GreedyDual; Young, "The k-server dual and loose competitiveness for
    paging", 1994). So checkpoints of equal cost are evicted in the order of their last use.

    A slot that is written or read in a step is not used again in the same step, because the order of reading and
    writing within a step is not defined.

    Attributes:
        num_evicted: number of checkpoints that were evicted or lost their block so far.
        version: changes whenever a checkpoint can be found that could not be found before.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evicted = self.version = 0
        self._free = dict.fromkeys(reversed(range(num_slots)))
        self._index: dict[bytes, _Checkpoint] = {}
        self._order: list[tuple[int, int, _Checkpoint]] = []
        self._used_now: set[int] = set()
        self._age = self._num_entries = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def find(self, key: bytes) -> int | None:
        """The slot of a checkpoint; None if it is not in the index."""
        checkpoint = self._index.get(key)
        return None if checkpoint is None else checkpoint.slot

    @property
    def num_used(self) -> int:
        """Number of slots that are in the index or have been reserved."""
        return self.num_slots - len(self._free)

    def begin_step(self) -> None:
        """Allow the slots that the last step wrote or read to be evicted."""
        self._used_now.clear()

    def read(self, key: bytes, cost: int) -> int:
        """Return the slot of a checkpoint that the step reads, and renew its priority."""
        checkpoint = self._index[key]
        checkpoint.cost = cost
        self._enter(checkpoint)
        self._used_now.add(checkpoint.slot)
        return checkpoint.slot

    def reserve(self) -> int | None:
        """Take a slot that the step writes, and evict a checkpoint if none is free; None if all are used in the step.

        The caller registers or releases it later.
        """
        slot = next((slot for slot in reversed(self._free) if slot not in self._used_now), None)
        if slot is None:
            slot = self._evict()
        if slot is not None:
            del self._free[slot]
            self._used_now.add(slot)
        return slot

    def register(self, slot: int, key: bytes, cost: int) -> bool:
        """Index a reserved slot that has been written; False if it is released because there is one with this key."""
        if key in self._index:
            self._free[slot] = None
            return False
        checkpoint = self._index[key] = _Checkpoint(key, slot, cost)
        self._enter(checkpoint)
        self.version += 1
        return True

    def take(self, key: bytes) -> int:
        """Remove a checkpoint from the index, and return its slot, which the caller registers or releases later."""
        checkpoint = self._index.pop(key)
        checkpoint.entry = 0
        return checkpoint.slot

    def release(self, slot: int) -> None:
        """Return a reserved slot that is not registered."""
        self._free[slot] = None

    def discard(self, key: bytes) -> bool:
        """Remove a checkpoint if it is in the index; returns whether it was."""
        checkpoint = self._index.pop(key, None)
        if checkpoint is None:
            return False
        checkpoint.entry = 0
        self._free[checkpoint.slot] = None
        return True

    def drop(self, key: bytes) -> None:
        """Remove the checkpoint of a block that has left the prefix cache."""
        self.num_evicted += self.discard(key)

    def _enter(self, checkpoint: _Checkpoint) -> None:
        self._num_entries += 1
        checkpoint.entry = self._num_entries
        heappush(self._order, (self._age + checkpoint.cost, checkpoint.entry, checkpoint))
        if len(self._order) > 2 * len(self._index) + MIN_OBSOLETE:
            self._order = sorted(item for item in self._order if item[1] == item[2].entry)

    def _evict(self) -> int | None:
        """Remove the checkpoint with the lowest priority that the step does not use, and return its slot."""
        kept = []
        slot = None
        while slot is None and self._order:
            priority, entry, checkpoint = item = heappop(self._order)
            if checkpoint.entry != entry:
                continue
            if checkpoint.slot in self._used_now:
                kept.append(item)
                continue
            self._age, slot = priority, checkpoint.slot
            self.drop(checkpoint.key)
        for item in kept:
            heappush(self._order, item)
        return slot
