"""The measure of studies of the prefix cache: its hit rate over a trace with block hashes, by the size of the pool.

Requests follow each other on the engine's own block pool, without time: each finds the longest cached prefix of its
blocks, computes and caches the others, and releases all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

from chairlift.core.kv.block_pool import BlockPool
from chairlift.errors import ConfigError
from chairlift.lab.presets.study import StudySystem
from chairlift.lab.workload.traces import MooncakeLine, json_records


def measure(system: StudySystem, _seed: int) -> dict[str, float]:
    """The hit rate of a system, whose pool has `num_blocks` blocks; null: all blocks of the trace."""
    assert system.study.trace is not None
    hashes = read_hashes(system.study.trace, system.count)
    return {"hit_rate": hit_rate(hashes, system.engine["num_blocks"] or len(set().union(*hashes)))}


@lru_cache(maxsize=1)
def read_hashes(path: Path, limit: int) -> list[list[bytes]]:
    """The hashes of the blocks of the first `limit` requests of a trace in Mooncake's format.

    Raises:
        ConfigError: the trace cannot be read, has no blocks, or an id that is not from 0 to 2**64 - 1.
    """
    hashes = []
    for place, line in islice(json_records(path, MooncakeLine), limit):
        for number in line.hash_ids:
            if not 0 <= number < 1 << 64:
                raise ConfigError(f"{place}: hash_ids must be from 0 to 2**64 - 1, got {number}: correct the trace")
        hashes.append([number.to_bytes(8) for number in line.hash_ids])
    if not any(hashes):
        raise ConfigError(f"trace={path}: the requests have no hash_ids: give a trace of requests with blocks")
    return hashes


def hit_rate(requests: Sequence[Sequence[bytes]], num_blocks: int) -> float:
    """The share of the blocks of all requests that are found in the cache. Of a request that is larger than the pool,
    only the first blocks are stored."""
    pool, num_hits = BlockPool(num_blocks), 0
    for hashes in requests:
        stored = hashes[:num_blocks]
        num_found = next((index for index, name in enumerate(stored) if pool.find(name) is None), len(stored))
        blocks = [block for name in stored[:num_found] if (block := pool.find(name)) is not None]
        pool.share(blocks)
        blocks += pool.allocate(len(stored) - num_found)
        for block, block_hash in zip(blocks, stored, strict=True):
            pool.register(block, block_hash)
        pool.release(reversed(blocks))
        num_hits += num_found
    return num_hits / sum(map(len, requests))
