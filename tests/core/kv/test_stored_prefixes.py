"""Property test: prefixes from a block store give the tokens that computing them gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.engine_core import EngineCore
from chairlift.core.kv.kv_groups import FULL
from support.fakes import CheckingExecutor, make_engine, make_request

BLOCK_SIZE = 4


class MemoryStore:
    """Keeps what the slots of a block contain, and loads as many blocks as it is allowed to."""

    def __init__(self, kept: dict[bytes, list[Any]], limits: list[int]) -> None:
        self.kept, self.limits = kept, limits
        self.executor: CheckingExecutor | None = None
        self.num_loaded = 0

    def _slots(self, block_id: int) -> range:
        return range(block_id * BLOCK_SIZE, (block_id + 1) * BLOCK_SIZE)

    def save(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        assert self.executor is not None
        for block_hash, block_id in zip(hashes, block_ids, strict=True):
            content = [self.executor.memory[slot] for slot in self._slots(block_id)]
            assert self.kept.setdefault(block_hash, content) == content, "a hash stands for one content"

    def num_stored(self, hashes: Sequence[bytes]) -> int:
        return next((index for index, each in enumerate(hashes) if each not in self.kept), len(hashes))

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], start: int, num_tokens: int | None = None) -> int:
        assert self.executor is not None
        assert start % BLOCK_SIZE == 0
        limit = self.limits[self.num_loaded % len(self.limits)]
        count = 0
        for block_hash, block_id in zip(hashes, block_ids, strict=True):
            if block_hash not in self.kept or count == limit:
                break
            self.executor.memory.update(zip(self._slots(block_id), self.kept[block_hash], strict=True))
            count += 1
        self.num_loaded += count
        return count


PROMPT = st.lists(st.integers(1, 3), min_size=1, max_size=24)


def run(core: EngineCore, prompts: list[list[int]], salts: list[str | None]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for number, (prompt, salt) in enumerate(zip(prompts, salts, strict=True)):
        core.add(make_request(f"r{number}", prompt, 5, cache_salt=salt))
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


@settings(max_examples=80, deadline=None)
@given(
    runs=st.lists(st.lists(PROMPT, min_size=1, max_size=8), min_size=1, max_size=4),
    num_blocks=st.integers(8, 24),
    limits=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    salt=st.sampled_from([None, "tenant"]),
    windows=st.sampled_from([FULL, FULL, (None, 6), (4, 4), (3, None, 9)]),
)
def test_tokens_do_not_depend_on_the_store(
    runs: list[list[list[int]]], num_blocks: int, limits: list[int], salt: str | None, windows: tuple[int | None, ...]
) -> None:
    num_blocks *= len(windows)
    kept: dict[bytes, list[Any]] = {}
    for prompts in runs:  # each run is a restart with an empty pool
        salts = [salt if number % 2 else None for number in range(len(prompts))]
        plain, *_ = make_engine(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=4, windows=windows)
        expected = run(plain, prompts, salts)
        store = MemoryStore(kept, limits)
        core, _manager, store.executor, _events = make_engine(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=4, block_stores=[store], windows=windows
        )
        assert run(core, prompts, salts) == expected
        assert core.scheduler.is_idle


def test_a_finished_request_is_found_after_a_restart() -> None:
    kept: dict[bytes, list[Any]] = {}
    prompt = list(range(1, 20))
    cached = []
    for _ in range(2):
        store = MemoryStore(kept, [100])
        core, _, store.executor, _events = make_engine(block_size=BLOCK_SIZE, block_stores=[store])
        run(core, [prompt], [None])
        cached.append(store.num_loaded)
    assert cached == [0, 4]
