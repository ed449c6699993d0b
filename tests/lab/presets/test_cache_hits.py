"""The hit rate of the prefix cache by its size, over a trace in Mooncake's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preset_studies import mean

from chairlift.errors import ConfigError
from chairlift.lab.presets import find_preset
from chairlift.lab.presets.measures import hit_rate

PRESET = find_preset("mooncake-table-1")


def trace(path: Path, requests: list[list[int]]) -> Path:
    lines = [
        {"timestamp": 1000 * index, "input_length": 512 * len(ids), "output_length": 9, "hash_ids": ids}
        for index, ids in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def names(*requests: list[int]) -> list[list[bytes]]:
    return [[number.to_bytes(8) for number in ids] for ids in requests]


def test_the_least_recently_used_blocks_are_evicted_from_the_end() -> None:
    """The pool of three keeps 1 of the first request, which the third one finds."""
    assert hit_rate(names([1, 2], [3, 4], [1, 2]), 3) == 1 / 6
    assert hit_rate(names([1, 2], [3, 4], [1, 2]), 4) == 2 / 6
    assert hit_rate(names([1, 2], [1, 3], [1, 2, 4]), 9) == 3 / 7


def test_a_request_larger_than_the_pool_stores_its_beginning() -> None:
    assert hit_rate(names([1, 2, 3], [1, 2, 3]), 2) == 2 / 6


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 6))
def test_requests_of_one_block_have_the_hits_of_an_lru(blocks: list[int], size: int) -> None:
    stored: list[int] = []
    num_hits = 0
    for block in blocks:
        num_hits += block in stored
        stored = [block, *(other for other in stored if other != block)][:size]
    assert hit_rate(names(*([block] for block in blocks)), size) == num_hits / len(blocks)


def test_the_preset_reads_the_trace_and_shows_the_published_rates(tmp_path: Path) -> None:
    path = trace(tmp_path / "trace.jsonl", [[0, 1, 2], [0, 1, 3], [0, 4], [9]])
    (result,) = PRESET.run(trace=path)
    assert mean(result, "all blocks, LRU", "hit_rate") == 3 / 9
    assert result.published("1,000 blocks, LRU", "hit_rate") == 0.3
    assert result.study.constants()[0][1] == f"at most 23,608 requests of {path}"
    (shorter,) = PRESET.run(trace=path, num_prompts=2)
    assert mean(shorter, "all blocks, LRU", "hit_rate") == 2 / 6


def test_a_trace_is_required_and_needs_hashes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preset mooncake-table-1 needs a trace: give --trace FILE, the request"):
        PRESET.run()
    with pytest.raises(ConfigError, match=r"trace=.* does not apply; its options are: workload_seed, num_prompts"):
        find_preset("orca").run(trace=tmp_path)
    for requests, problem in (([], "the requests have no hash_ids"), ([[]], "no hash_ids"), ([[1, -1]], "got -1:")):
        with pytest.raises(ConfigError, match=problem):
            PRESET.run(trace=trace(tmp_path / "wrong.jsonl", requests))
    path = tmp_path / "other.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 1: .*hash_ids"):
        PRESET.run(trace=path)
