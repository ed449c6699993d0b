"""Reservations: all the memory that a request may need, consecutive, at admission, until it ends.

What serving systems did before paging, with the same kernels and the same blocks: a reservation is a block table whose
blocks are consecutive. It never grows, so nobody is preempted; and nobody shares, so there is no prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from chairlift.core.arena import Arena, Piece, power_of_two_above
from chairlift.core.kv_cache_manager import MemoryDemand
from chairlift.errors import RequestError
from chairlift.request import Request

Reservation = Callable[[Request, int], int]
"""Slots to reserve for a request, given `max_model_len`. P prompt and n output tokens write P + n - 1 slots."""


def exact(request: Request, max_model_len: int) -> int:
    """P and `max_tokens`: what Orca (Yu et al., OSDI'22, section 4.2) and TGI reserve."""
    return request.max_total_tokens - 1


def longest(request: Request, max_model_len: int) -> int:
    """`max_model_len`, whatever is asked for: "Orca (Max)" of Kwon et al., SOSP'23, section 6.1."""
    return max_model_len


def power_of_two(request: Request, max_model_len: int) -> int:
    """P and the true output length rounded up to a power of two: "Orca (Pow2)", ibid."""
    return min(request.num_prompt_tokens + power_of_two_above(_known_output_len(request)), max_model_len) - 1


def oracle(request: Request, max_model_len: int) -> int:
    """P and the true output length: "Orca (Oracle)", ibid."""
    return request.num_prompt_tokens + _known_output_len(request) - 1


def _known_output_len(request: Request) -> int:
    if request.output_len is None:
        raise RequestError(
            f"request {request.request_id}: reservations of kind pow2 and oracle must know the output's length, and "
            f"only a request with a forced one has it: ignore_eos, max_tokens, and no stop strings or stop_token_ids. "
            f"Choose --kv paged, exact or max to serve others.",
            "ignore_eos",
        )
    return request.output_len


RESERVATIONS: dict[str, Reservation] = {"exact": exact, "max": longest, "pow2": power_of_two, "oracle": oracle}


@dataclass(frozen=True, slots=True)
class _Held:
    piece: Piece
    block_ids: list[int]


class ReservationKVCacheManager:
    """A KVCacheManager whose tables are consecutive and complete from admission on.

    The table holds the blocks that were asked for; what the arena rounds up besides is lost to everybody until the
    request ends.
    """

    grows = False

    def __init__(self, arena: Arena, block_size: int, max_model_len: int, reservation: Reservation) -> None:
        self.num_blocks = arena.num_blocks
        self.block_size = block_size
        self._arena = arena
        self._max_model_len = max_model_len
        self._reservation = reservation
        self._held: dict[str, _Held] = {}
        self._num_rounding = 0
        self._version = 0

    @property
    def num_free_blocks(self) -> int:
        return self._arena.num_free

    @property
    def num_evictable_blocks(self) -> int:
        return 0

    @property
    def num_rounding_blocks(self) -> int:
        return self._num_rounding

    @property
    def num_shared_blocks(self) -> int:
        return 0

    @property
    def version(self) -> int:
        return self._version

    def block_ids(self, request: Request) -> list[int]:
        return self._held[request.request_id].block_ids

    def check_fits(self, request: Request) -> None:
        num_slots = self._reservation(request, self._max_model_len)
        needed = self._blocks_for(num_slots)
        if needed > self._arena.largest_piece:
            raise RequestError(
                f"request {request.request_id} can never fit: it would reserve {num_slots} slots = {needed} "
                f"consecutive blocks of {self.block_size}, and the largest piece that the arena of {self.num_blocks} "
                f"blocks can give has {self._arena.largest_piece}. Lower max_tokens, shorten the prompt, give the "
                f"engine more --kv-cache-memory, or choose --kv paged.",
                "max_tokens",
            )

    def worst_case_blocks(self, request: Request) -> int:
        return self._arena.rounded(self._blocks_for(self._reservation(request, self._max_model_len)))

    def num_duplicate_blocks(self, requests: Iterable[Request]) -> int:
        return 0

    def demand(self, request: Request) -> MemoryDemand:
        return MemoryDemand(self.worst_case_blocks(request), self._arena.num_free, 0, self._arena.largest_free)

    def admit(self, request: Request) -> bool:
        assert request.request_id not in self._held
        count = self._blocks_for(self._reservation(request, self._max_model_len))
        piece = self._arena.allocate(count)
        if piece is None:
            return False
        self._held[request.request_id] = _Held(piece, list(range(piece.start, piece.start + count)))
        self._num_rounding += piece.size - count
        request.num_slots = count * self.block_size
        request.num_computed_tokens = 0
        return True

    def grow(self, request: Request, num_slots: int) -> list[int] | None:
        raise AssertionError("a reservation holds all that its request will ever need")

    def commit(self, request: Request) -> None:
        """Nothing is shared."""

    def free(self, request: Request) -> None:
        held = self._held.pop(request.request_id)
        self._num_rounding -= held.piece.size - len(held.block_ids)
        self._arena.release(held.piece)
        self._version += 1
        request.num_slots = 0

    def forget(self, request: Request) -> None:
        """Nothing is kept for requests without memory."""

    def _blocks_for(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        pieces = sorted(held.piece for held in self._held.values())
        assert all(a.start + a.size <= b.start for a, b in pairwise(pieces))
        assert self._arena.num_free == self.num_blocks - sum(piece.size for piece in pieces)
        assert self._num_rounding == sum(held.piece.size - len(held.block_ids) for held in self._held.values())
        for held in self._held.values():
            start, size = held.piece
            assert held.block_ids == list(range(start, start + len(held.block_ids)))
            assert len(held.block_ids) <= size
