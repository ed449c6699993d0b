"""PrefixMisses: why the prefix cache had no more of a prompt.

    an earlier prompt   [ you are helpful ][ today is monday ][ tools ...
    this prompt         [ you are helpful ][ today is sunday ][ tools ...      differs at "sunday", and then repeats
                          found              first miss

Of a prompt it keeps one byte of each token id, its mark: marks show where two prompts differ, and no text can be read
from them.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Final, NamedTuple

from chairlift.core.kv.block_hashes import group_key
from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.block_tables import BlockTables
from chairlift.core.kv.kv_groups import KVGroups
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.outputs import MissReason, PrefixMatch
from chairlift.request import Request

MAX_PROMPTS, MAX_MARKS, MAX_EVICTED = 512, 4 << 20, 8192
"""The most prompts, their marks, and evicted blocks that are remembered."""

WINDOW, MAX_WINDOWS = 16, 64
"""The length and the largest number of the parts of a prompt that are searched in an earlier one."""

_LOW_BYTE: Final = 0 if sys.byteorder == "little" else 7


class _Prompt(NamedTuple):
    """The tokens of a request: its prompt, and all computed ones when it has ended.

    Attributes:
        caller: salt, tenant and adapter. Requests may know of earlier ones with the same caller.
    """

    caller: tuple[str | None, str, int]
    marks: bytes
    is_running: bool


class PrefixMisses:
    """Remembers recent prompts and evicted blocks, and compares the prompt of each admitted request with them.

    Attributes:
        taker: the request that takes the blocks which are evicted.
    """

    def __init__(self, cache: PrefixCache, pool: BlockPool, groups: KVGroups) -> None:
        self._cache, self._pool = cache, pool
        self._num_groups, self._block_size = len(groups.windows), groups.block_size
        self.taker = ""
        self._admitted: dict[str, tuple[BlockTables, int]] = {}
        self._evicted: OrderedDict[bytes, tuple[str, float, float]] = OrderedDict()
        self._prompts: OrderedDict[str, _Prompt] = OrderedDict()
        self._sorted: list[tuple[bytes, str]] = []
        self._num_marks = 0
        pool.index_listeners.append(self._record_index_change)

    def attach(self, tables: BlockTables) -> None:
        """Remember how many blocks an admitted request shares, before others are loaded."""
        self._admitted[tables.request.request_id] = tables, tables.num_committed

    def match(self, request: Request, num_matched: int) -> PrefixMatch | None:
        """What was found of the prompt of an admitted request, and why not more; None for one that was forked.

        Args:
            num_matched: the number of tokens with K and V, of which the recurrent state may be known for fewer.
        """
        if (admitted := self._admitted.get(request.request_id)) is None:
            return None
        (tables, num_shared), size = admitted, self._block_size
        caller = request.cache_salt, request.tenant, request.lora_id
        prompt = _Prompt(caller, _marks(request.token_ids), is_running=True)
        miss = self._miss(request, prompt, tables.num_committed * size, num_matched)
        self._remember(request.request_id, prompt)
        num_disk = (tables.num_committed - num_shared) * size
        return replace(miss, num_memory_tokens=num_shared * size, num_disk_tokens=num_disk)

    def finish(self, request: Request) -> None:
        """Remember what was computed of a request that has ended: the next turn of its conversation repeats it."""
        self._admitted.pop(request.request_id, None)
        if (prompt := self._prompts.get(request.request_id)) is not None:
            end = request.num_computed_tokens
            marks = prompt.marks[: min(end, request.num_prompt_tokens)]
            marks += _marks(request.token_ids[len(marks) : end])
            self._remember(request.request_id, prompt._replace(marks=marks, is_running=False))

    # -- reasons -------------------------------------------------------------------------------------------------

    def _miss(self, request: Request, prompt: _Prompt, start: int, num_matched: int) -> PrefixMatch:
        """Why the block at `start` was not found."""
        end = start + self._block_size
        if end >= len(prompt.marks):
            return PrefixMatch()  # All that can be found, because a token must be left to compute.
        if request.sampling_params.prompt_logprobs is not None:
            return PrefixMatch(reason=MissReason.PROMPT_LOGPROBS)
        own = list(dict.fromkeys(each for each in self._neighbours(prompt) if each[0] >= start))
        known = next((request_id for common, request_id in own if common >= end), None)
        difference = self._difference(own if known is None else (), prompt.marks)
        # Several keys may have a salt in common, or none, so the block may be that of another key: its reason is shown
        # only to a caller with an earlier prompt that has the block.
        is_own = known is not None or not request.tenant
        if not is_own and difference.reason == MissReason.DIFFERS:
            return difference
        key = self._cache.chain(request, end // self._block_size)[-1]
        if num_matched > start or self._pool.find(key) is not None:
            return PrefixMatch(reason=MissReason.CHECKPOINT_MISSING, is_own=is_own)
        for group in range(self._num_groups):
            if (evicted := self._evicted.get(group_key(key, group))) is not None:
                taker, time, idle = evicted
                reason = MissReason.EVICTED
                return PrefixMatch(reason=reason, is_own=is_own, other_id=taker, evicted_time=time, idle_seconds=idle)
        if known is not None:
            is_running = self._prompts[known].is_running
            return PrefixMatch(reason=MissReason.IN_PROGRESS if is_running else MissReason.EVICTED)
        if difference.reason == MissReason.DIFFERS:
            return difference
        return self._seen_elsewhere(prompt, start, end) or difference

    def _neighbours(self, prompt: _Prompt) -> Iterator[tuple[int, str]]:
        """The last prompt of the same caller and those beside this one in the order of their tokens, one of which has
        the longest prefix in common with it: the lengths of the common prefixes, and the ids."""
        at = bisect_left(self._sorted, (prompt.marks, ""))
        before, after = reversed(self._sorted[:at]), self._sorted[at:]
        for ids in ((each for _, each in before), (each for _, each in after), reversed(self._prompts)):
            found = next((each for each in ids if self._prompts[each].caller == prompt.caller), None)
            if found is not None:
                yield _common_length(self._prompts[found].marks, prompt.marks), found

    def _seen_elsewhere(self, prompt: _Prompt, start: int, end: int) -> PrefixMatch | None:
        """Whether the first `end` tokens are known from another caller, or from this one with another adapter."""
        first = prompt.marks[:end]
        start_at = bisect_left(self._sorted, (first, ""))
        found = list(takewhile(lambda each: each[0].startswith(first), self._sorted[start_at:]))
        own = [each for each in found if self._prompts[each[1]].caller[:2] == prompt.caller[:2]]
        if not found:
            return None
        candidates = own or found
        at = bisect_left(candidates, (prompt.marks, ""))  # One of the two beside it has most tokens in common.
        nearest = candidates[max(0, at - 1) : at + 1]
        common, other_id = max((_common_length(marks, prompt.marks), request_id) for marks, request_id in nearest)
        reason = MissReason.OTHER_ADAPTER if own else MissReason.OTHER_SALT
        if not own and self._prompts[other_id].caller[0] == prompt.caller[0]:
            reason = MissReason.EVICTED
        return PrefixMatch(reason=reason, is_own=bool(own), num_repeated_tokens=common - start, other_id=other_id)

    def _difference(self, own: Sequence[tuple[int, str]], marks: bytes) -> PrefixMatch:
        """The first token that differs from an earlier prompt with the same text after it."""
        best = PrefixMatch(reason=MissReason.NEVER_SEEN)
        for position, other_id in own:
            num_repeated, num_moved = _repetition(self._prompts[other_id].marks, marks, position)
            if num_repeated > best.num_repeated_tokens:
                best = PrefixMatch(
                    reason=MissReason.DIFFERS,
                    position=position,
                    num_repeated_tokens=num_repeated,
                    num_moved_tokens=num_moved,
                    other_id=other_id,
                )
        return best

    # -- memory --------------------------------------------------------------------------------------------------

    def _record_index_change(self, key: bytes, is_added: bool) -> None:
        self._evicted.pop(key, None)
        if not is_added:
            self._evicted[key] = self.taker, self._pool.order.now, self._pool.order.idle_seconds
            if len(self._evicted) > MAX_EVICTED:
                self._evicted.popitem(last=False)

    def _remember(self, request_id: str, prompt: _Prompt) -> None:
        """Keep a prompt in place of the ended ones that it continues, and drop the oldest ones beyond the limits."""
        self._drop(request_id)
        for common, other_id in list(self._neighbours(prompt)):
            other = self._prompts.get(other_id)
            if other is not None and not other.is_running and common == len(other.marks):
                self._drop(other_id)
        self._prompts[request_id] = prompt
        insort(self._sorted, (prompt.marks, request_id))
        self._num_marks += len(prompt.marks)
        while len(self._prompts) > MAX_PROMPTS or self._num_marks > MAX_MARKS:
            self._drop(next(iter(self._prompts)))

    def _drop(self, request_id: str) -> None:
        if (prompt := self._prompts.pop(request_id, None)) is not None:
            del self._sorted[bisect_left(self._sorted, (prompt.marks, request_id))]
            self._num_marks -= len(prompt.marks)


def _marks(token_ids: list[int]) -> bytes:
    return array("q", token_ids).tobytes()[_LOW_BYTE::8]


def _common_length(first: bytes, second: bytes) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def _repetition(earlier: bytes, marks: bytes, start: int) -> tuple[int, int]:
    """About how many of the tokens after `start` an earlier prompt has after it, too; and by how many tokens the first
    of them has moved to the front: 0 if text was replaced, and a positive number if text was removed.

    As in rsync (Tridgell and Mackerras, 1996), the earlier prompt is divided into parts, and those that begin at each
    of WINDOW successive tokens are looked up. The time is proportional to the lengths, also of periodic prompts.
    """
    places = {earlier[at : at + WINDOW]: at for at in reversed(range(start, len(earlier) - WINDOW + 1, WINDOW))}
    stride = max(WINDOW, (len(marks) - start) // MAX_WINDOWS)
    num_found, num_moved = 0, 0
    for first in range(start + 1, len(marks) - WINDOW + 1, stride):
        for position in range(first, min(first + WINDOW, len(marks) - WINDOW + 1)):
            if (found := places.get(marks[position : position + WINDOW])) is not None:
                num_moved = num_moved if num_found else found - position
                num_found += 1
                break
    return min(num_found * stride, len(marks) - start), num_moved
