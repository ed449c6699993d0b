"""Reservations: a request gets all memory that it may need at admission, in consecutive blocks, until it finishes.

Serving systems did so before paging. A reservation is a block table whose blocks are consecutive, so the same kernels
run on it. It never grows, so no request is preempted, and no block is shared, so there is no prefix cache.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Final, NoReturn

from chairlift.core.baselines.arena import Arena, BlockRange, power_of_two_above
from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryCounts, MemoryDemand
from chairlift.core.length_predictors import forced_output_len
from chairlift.errors import RequestError
from chairlift.request import Request


@dataclass(frozen=True, slots=True)
class _ReservedTable:
    piece: BlockRange
    block_ids: list[int]


class ReservationKVCacheManager(KVCacheManager):
    """Block tables that are consecutive, and complete from admission on.

    The table holds the blocks that the reservation asks for. Further blocks in its piece are lost to rounding until the
    request finishes.
    """

    version = 0
    can_preempt = False

    def __init__(self, arena: Arena, block_size: int, max_model_len: int) -> None:
        self.num_blocks = arena.num_blocks
        self.block_size = block_size
        self._arena = arena
        self.max_model_len = max_model_len
        self._tables: dict[str, _ReservedTable] = {}
        self._num_rounding_blocks = 0

    @abstractmethod
    def reserved_slots(self, request: Request) -> int:
        """Slots to reserve for a request. P prompt and n output tokens write P + n - 1 slots."""

    @property
    def num_free_blocks(self) -> int:
        return self._arena.num_free

    def counts(self) -> MemoryCounts:
        return MemoryCounts(num_rounding_blocks=self._num_rounding_blocks)

    def block_tables(self, request: Request) -> list[list[int]]:
        return [self._tables[request.request_id].block_ids]

    def check_fits(self, request: Request) -> None:
        needed = self._num_reserved_blocks(request)
        if needed > self._arena.largest_piece:
            raise RequestError(
                f"the request can never fit: it would reserve {self.reserved_slots(request)} slots = {needed} "
                f"consecutive blocks of {self.block_size}, and the largest piece of the arena of {self.num_blocks} "
                f"blocks has {self._arena.largest_piece}. Lower max_tokens, shorten the prompt, give the engine more "
                f"--kv-cache-memory-bytes, or choose --kv paged.",
                "max_tokens",
            )

    def worst_case_blocks(self, request: Request) -> int:
        return self._arena.rounded_size(self._num_reserved_blocks(request))

    def demand(self, request: Request) -> MemoryDemand:
        return MemoryDemand(self.worst_case_blocks(request), self._arena.num_free, 0, self._arena.largest_free)

    def allocate(self, request: Request) -> int | None:
        assert request.request_id not in self._tables
        count = self._num_reserved_blocks(request)
        piece = self._arena.allocate(count)
        if piece is None:
            return None
        self._tables[request.request_id] = _ReservedTable(piece, list(range(piece.start, piece.start + count)))
        self._num_rounding_blocks += piece.size - count
        request.num_slots = count * self.block_size
        return 0

    def grow(self, request: Request, num_slots: int) -> NoReturn:
        raise AssertionError("a reservation holds all slots that its request can need")

    def free(self, request: Request) -> None:
        table = self._tables.pop(request.request_id)
        self._num_rounding_blocks -= table.piece.size - len(table.block_ids)
        self._arena.release(table.piece)
        self.version += 1
        request.num_slots = 0

    def _num_reserved_blocks(self, request: Request) -> int:
        return -(-self.reserved_slots(request) // self.block_size)


class ExactReservations(ReservationKVCacheManager):
    """P and `max_tokens`: what Orca (Yu et al., OSDI'22, section 4.2) and TGI reserve."""

    def reserved_slots(self, request: Request) -> int:
        return request.max_total_tokens - 1


class MaxReservations(ReservationKVCacheManager):
    """`max_model_len` for every request: "Orca (Max)" of Kwon et al., SOSP'23, section 6.1."""

    def reserved_slots(self, request: Request) -> int:
        return self.max_model_len


class Pow2Reservations(ReservationKVCacheManager):
    """P and the true output length rounded up to a power of two: "Orca (Pow2)", ibid."""

    def reserved_slots(self, request: Request) -> int:
        length = request.num_prompt_tokens + power_of_two_above(_forced_output_len(request))
        return min(length, self.max_model_len) - 1


class OracleReservations(ReservationKVCacheManager):
    """P and the true output length: "Orca (Oracle)", ibid."""

    def reserved_slots(self, request: Request) -> int:
        return request.num_prompt_tokens + _forced_output_len(request) - 1


def _forced_output_len(request: Request) -> int:
    return forced_output_len(request, "kv=pow2 and kv=oracle reserve by the output length", "--kv paged, exact or max")


RESERVATIONS: Final[dict[str, type[ReservationKVCacheManager]]] = {
    "exact": ExactReservations,
    "max": MaxReservations,
    "pow2": Pow2Reservations,
    "oracle": OracleReservations,
}
