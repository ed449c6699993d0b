"""What would have let a request in when it was first refused: the engine's own memory managers, asked again with one
option changed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from chairlift.config import KV_POLICIES
from chairlift.core.baselines.selection import make_kv_cache_manager
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted
from chairlift.observability.queue_timeline import Holder
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams

NEED_LENGTHS: Final = frozenset({"pow2", "oracle"})
"""Policies that only requests with a forced length may use."""

MAX_AHEAD: Final = 64
"""Behind a longer queue only its own place is asked about: a pool for all of them says little, and takes long."""


class Ask(NamedTuple):
    """A request that waits. `num_known`: its tokens so far; `needed`: blocks that it was told to need, if it was."""

    num_prompt_tokens: int
    num_known: int
    max_tokens: int
    output_len: int | None
    needed: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The moment at which a request was first left waiting.

    Attributes:
        holders: the batch then; ahead: who stood before it in the queue.
        free_blocks, largest_free_piece: of the pool; of a static batch, what its members left at their worst.
    """

    started: EngineStarted
    reason: str
    request: Ask
    holders: Sequence[Holder]
    ahead: Sequence[Ask]
    num_running: int
    free_blocks: int
    largest_free_piece: int


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One way in.

    Attributes:
        changes: option of the engine, or field of the request -> value.
        admits: whether the request would have been admitted then.
    """

    changes: Mapping[str, int | str]
    admits: bool
    text: str = field(default="")


def what_ifs(refusal: Refusal) -> list[WhatIf]:
    """Ways in, those of the engine's options first. Empty where it did not wait for anything that has an option."""
    if refusal.reason in ("sibling_prefill", "pending_token", "next_step", "unknown", "restart"):
        return []
    found: list[WhatIf | None] = []
    if len(refusal.ahead) <= MAX_AHEAD:
        found += [_larger_engine(refusal), _shorter_answer(refusal), *_other_policies(refusal)]
        if refusal.started.batching == "static":
            found.append(_continuous(refusal))
    if refusal.ahead:
        found.append(_first_in_queue(refusal))
    return [found_one for found_one in found if found_one is not None]


# -- the same policy -----------------------------------------------------------------------------------------------


def _larger_engine(refusal: Refusal) -> WhatIf | None:
    """The fewest seats and blocks with which it would have been admitted, those ahead of it first."""
    if refusal.reason == "batch":
        return None
    started = refusal.started
    changes: dict[str, int | str] = {}
    seats = refusal.num_running + len(refusal.ahead) + 1
    if started.static_batch_size is not None and seats > started.static_batch_size:
        changes["static_batch_size"] = seats
    if seats > started.max_num_seqs:
        changes["max_num_seqs"] = seats
    num_blocks = _fewest_blocks(refusal)
    if num_blocks > started.num_blocks:
        changes["num_kv_blocks"] = num_blocks
    if not changes:
        if refusal.reason != "memory":
            return None
        return WhatIf(
            {"num_kv_blocks": started.num_blocks},
            True,
            f"num_kv_blocks={started.num_blocks} in one piece would have admitted it",
        )
    text = " and ".join(f"{option}={value}" for option, value in changes.items())
    return WhatIf(changes, True, f"{text} would have admitted it")


def _fewest_blocks(refusal: Refusal) -> int:
    """The smallest pool that holds the batch, those ahead and the request.

    Paged blocks need not be consecutive, so what is missing is missing in number only. An arena is filled anew: what
    fragmentation has lost is not counted.
    """
    started = refusal.started
    asks = [*refusal.ahead, refusal.request]
    needed = sum(_needed(started, asks))
    if started.kv == "paged" or started.batching == "static":
        return started.num_blocks + max(0, needed - refusal.free_blocks)
    sizes = range(1, 2 * (started.num_blocks + needed) + 1)
    return bisect_left(sizes, True, key=lambda size: _holds(started, started.kv, size, refusal.holders, asks)) + 1


def _needed(started: EngineStarted, asks: Iterable[Ask]) -> list[int]:
    """Blocks that each needs: as it was told, or from an empty pool."""
    manager = _manager(started, started.kv, started.num_blocks)

    def of(ask: Ask) -> int:
        if ask.needed is not None:
            return ask.needed
        if started.batching == "static":
            return manager.worst_case_blocks(_request(ask))
        return manager.demand(_request(ask)).needed

    return [of(ask) for ask in asks]


def _shorter_answer(refusal: Refusal) -> WhatIf | None:
    """The largest `max_tokens` that would have been admitted; None where it changes nothing or memory was not short."""
    started, ask = refusal.started, refusal.request
    if refusal.reason not in ("memory", "preemption") or refusal.ahead or started.kv == "max":
        return None
    if started.kv == "paged" and started.batching != "static":
        return WhatIf(
            {"max_tokens": 1},
            False,
            "a smaller max_tokens would not have admitted it: paged blocks are allocated on demand",
        )
    room = refusal.free_blocks if started.kv == "paged" else refusal.largest_free_piece
    lengths = range(1, ask.max_tokens)
    fitting = bisect_left(lengths, True, key=lambda tokens: _needed(started, [_shortened(ask, tokens)])[0] > room)
    if fitting == 0:
        return WhatIf({"max_tokens": 1}, False, "max_tokens=1 would not have admitted it")
    return WhatIf({"max_tokens": fitting}, True, f"max_tokens={fitting} would have admitted it")


def _shortened(ask: Ask, max_tokens: int) -> Ask:
    output_len = None if ask.output_len is None else min(ask.output_len, max_tokens)
    return ask._replace(max_tokens=max_tokens, output_len=output_len, needed=None)


# -- other policies ------------------------------------------------------------------------------------------------


def _other_policies(refusal: Refusal) -> list[WhatIf]:
    """The same batch and queue under every other policy of memory. What a prefix cache would share is not counted."""
    if refusal.reason not in ("memory", "preemption") or refusal.started.batching == "static":
        return []
    started = refusal.started
    asks = [*refusal.ahead, refusal.request]
    lengths = [holder.output_len for holder in refusal.holders] + [ask.output_len for ask in asks]
    is_forced = None not in lengths
    has_seats = refusal.num_running + len(asks) <= started.max_num_seqs
    found = []
    for kv in KV_POLICIES:
        if kv == started.kv or (kv in NEED_LENGTHS and not is_forced):
            continue
        admits = has_seats and _holds(started, kv, started.num_blocks, refusal.holders, asks)
        found.append(WhatIf({"kv": kv}, admits, f"kv={kv} would {'' if admits else 'not '}have admitted it"))
    return found


def _continuous(refusal: Refusal) -> WhatIf:
    asks = [*refusal.ahead, refusal.request]
    has_seats = refusal.num_running + len(asks) <= refusal.started.max_num_seqs
    admits = has_seats and _holds(
        refusal.started, refusal.started.kv, refusal.started.num_blocks, refusal.holders, asks
    )
    return WhatIf(
        {"batching": "continuous"}, admits, f"batching=continuous would {'' if admits else 'not '}have admitted it"
    )


def _first_in_queue(refusal: Refusal) -> WhatIf:
    """Had it stood before all others."""
    started = refusal.started
    seats = started.max_num_seqs if started.static_batch_size is None else started.static_batch_size
    room = refusal.largest_free_piece if started.kv != "paged" else refusal.free_blocks
    admits = (
        refusal.reason != "batch" and refusal.num_running < seats and _needed(started, [refusal.request])[0] <= room
    )
    outcome = f"would {'' if admits else 'not '}have been admitted"
    text = f"at the head of the queue, ahead of {len(refusal.ahead)} requests, it {outcome}"
    return WhatIf({"scheduling_policy": "priority"}, admits, text)


# -- the managers --------------------------------------------------------------------------------------------------


def _holds(started: EngineStarted, kv: str, num_blocks: int, holders: Sequence[Holder], asks: Sequence[Ask]) -> bool:
    """Whether a pool that is filled with the batch, the latest last, has room for the asks in their order."""
    try:
        manager = _manager(started, kv, num_blocks)
    except ConfigError:  # kv=max, in a pool that does not hold one request
        return False
    members = [
        Ask(h.num_prompt_tokens, max(h.num_prompt_tokens, h.num_computed), h.max_tokens, h.output_len) for h in holders
    ]
    return all(manager.allocate(_request(entry, index)) for index, entry in enumerate((*members, *asks)))


def _manager(started: EngineStarted, kv: str, num_blocks: int) -> KVCacheManager:
    return make_kv_cache_manager(
        kv,
        num_blocks=num_blocks,
        block_size=started.block_size,
        max_model_len=started.max_model_len,
        enable_prefix_caching=False,
        arena=started.kv_arena or "buddy",
    )


def _request(ask: Ask, index: int = 0) -> Request:
    request = Request(
        str(index), [0] * ask.num_prompt_tokens, SamplingParams(), ask.max_tokens, output_len=ask.output_len
    )
    request.token_ids += [0] * (ask.num_known - ask.num_prompt_tokens)
    request.num_tokens = max(ask.num_known, ask.num_prompt_tokens)
    return request
