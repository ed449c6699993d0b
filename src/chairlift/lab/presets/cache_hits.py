"""The runner of studies of the prefix cache: its hit rate over a trace with block hashes, by the size of the pool.

Requests follow each other on the engine's own block pool, without time: each finds the longest cached prefix of its
blocks, computes and caches the others, and releases all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from chairlift.core.kv.block_pool import BlockPool
from chairlift.errors import ConfigError
from chairlift.lab.presets.study import MeasuredValue, Row, Study, StudyResult
from chairlift.lab.workload.traces.formats import MooncakeLine, json_records


def run(study: Study, advance: Callable[[], object]) -> StudyResult:
    """Measure the hit rate of each system, whose pool has `num_blocks` blocks; null: all blocks of the trace."""
    rows: dict[str, Row] = {}
    keys = {}
    assert study.trace is not None
    hashes = read_hashes(study.trace, next(study.systems()).count)
    for system in study.systems():
        num_blocks = system.engine["num_blocks"] or len(set().union(*hashes))
        rows[system.label] = {"hit_rate": MeasuredValue(hit_rate(hashes, num_blocks))}
        keys[system.label] = (system.case, system.name)
        advance()
    return StudyResult(study, rows, keys)


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
