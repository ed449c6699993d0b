"""Prefixes and checkpoints from a block store give the tokens that computing them gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.engine_core import EngineCore
from chairlift.core.kv.kv_groups import FULL
from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.events import RequestFinished
from support.fakes import (
    CheckingExecutor,
    PartlyRightProposals,
    collect,
    expected_tokens,
    make_engine,
    make_request,
    run_to_end,
)
from support.kv_invariants import check_manager

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


class CheckpointStore:
    """A `BlockStore` of entries of a CheckingExecutor: `size` for each block, or one for each checkpoint."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept: dict[bytes, list[Any]] = {}
        self.memory: dict[int, Any] = {}

    def save(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        for block_hash, block_id in zip(hashes, block_ids, strict=True):
            self.kept[block_hash] = [self.memory[block_id * self.size + index] for index in range(self.size)]

    def num_stored(self, hashes: Sequence[bytes]) -> int:
        return next((index for index, each in enumerate(hashes) if each not in self.kept), len(hashes))

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], start: int, num_tokens: int | None = None) -> int:
        count = self.num_stored(hashes)
        for block_hash, block_id in zip(hashes[:count], block_ids, strict=False):
            for index, entry in enumerate(self.kept[block_hash]):
                self.memory[block_id * self.size + index] = entry
        return count


class BrokenStore(CheckpointStore):
    """Fails to read what it has."""

    def load(self, *_: Any) -> int:
        return 0


def start_engine(stores: tuple[CheckpointStore, CheckpointStore], **options: Any) -> tuple[Any, ...]:
    """A new engine with the stores of an earlier one."""
    plan = CheckpointPlan(options.pop("num_slots", 20), 8 * BLOCK_SIZE)
    core, manager, executor, events = make_engine(
        **{"num_blocks": 100, "block_size": BLOCK_SIZE, "checkpoints": plan, "block_stores": stores, **options}
    )
    stores[0].memory, stores[1].memory = executor.memory, executor.checkpoints
    return core, manager, executor, events


def num_cached(events: Any) -> list[int]:
    return [event.num_cached_tokens for event in events.events if isinstance(event, RequestFinished)]


def test_a_conversation_goes_on_after_a_restart() -> None:
    stores = CheckpointStore(BLOCK_SIZE), CheckpointStore(1)
    prompt = list(range(50))
    cached = []
    for _ in range(4):
        core, manager, _, events = start_engine(stores)
        core.add(make_request("a", prompt, 20))
        assert run_to_end(core) == {"a": expected_tokens(prompt, 20)}
        check_manager(manager)
        prompt = prompt + expected_tokens(prompt, 20) + [1, 2, 3]
        cached += num_cached(events)
    assert cached == [0, 68, 92, 112], "K, V and state of the last token of an answer are not computed"


def test_salts_do_not_share_stored_checkpoints_and_adapters_are_not_stored() -> None:
    stores = CheckpointStore(BLOCK_SIZE), CheckpointStore(1)
    prompt, found = list(range(50)), []
    for options in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_id": 1}, {"lora_id": 1}, {"cache_salt": "a"}):
        core, _, _, events = start_engine(stores)
        core.add(make_request("a", prompt, 2, **options))
        run_to_end(core)
        found += num_cached(events)
    assert found == [0, 0, 0, 0, 48]


def test_a_failed_read_leaves_no_trace() -> None:
    blocks, states = CheckpointStore(BLOCK_SIZE), CheckpointStore(1)
    prompt = list(range(50))
    core, _, _, _ = start_engine((blocks, states))
    core.add(make_request("a", prompt, 4))
    run_to_end(core)
    for broken in (0, 1):
        stores = [CheckpointStore(BLOCK_SIZE), CheckpointStore(1)]
        stores[broken] = BrokenStore(stores[broken].size)
        stores[0].kept, stores[1].kept = blocks.kept, states.kept
        core, manager, _, events = start_engine((stores[0], stores[1]))
        core.add(make_request("a", prompt, 4))
        assert run_to_end(core) == {"a": expected_tokens(prompt, 4)}
        assert num_cached(events) == [0]
        check_manager(manager)
        assert manager.prefixes.checkpoints.num_used == len(manager.prefixes.checkpoints._index)


@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=30),
            st.integers(1, 20),
            st.sampled_from(["", "", "", "restart", "lose a block", "lose a checkpoint"]),
        ),
        min_size=2,
        max_size=10,
    ),
    num_blocks=st.integers(13, 40),
    num_slots=st.integers(0, 6),
    acceptance=st.sampled_from([None, 0.6]),
    num_steps=st.integers(0, 8),
)
@settings(max_examples=150, deadline=None)
def test_whatever_the_stores_have_answers_are_the_same(
    requests: list[tuple[list[int], int, str]],
    num_blocks: int,
    num_slots: int,
    acceptance: float | None,
    num_steps: int,
) -> None:
    """Requests with equal beginnings run together, in a small pool, with restarts and losses."""
    stores = CheckpointStore(BLOCK_SIZE), CheckpointStore(1)
    options: dict[str, Any] = {"num_blocks": num_blocks, "num_slots": num_slots, "max_num_seqs": 3}
    if acceptance is not None:
        options["propose"] = PartlyRightProposals(num_steps, acceptance)
    answers: dict[str, list[int]] = {}
    core, manager, _, _ = start_engine(stores, **options)
    for number, (prompt, max_tokens, action) in enumerate(requests):
        kept = stores[action == "lose a checkpoint"].kept
        if action == "restart":
            core, manager, _, _ = start_engine(stores, **options)
        elif action and kept:
            del kept[min(kept)]
        core.add(make_request(str(number), prompt, max_tokens))
        for _ in range(num_steps if number < len(requests) - 1 else 10_000):
            if core.has_work:
                collect(core.step(), answers)
                check_manager(manager)
    assert not core.has_work
    for number, (prompt, max_tokens, _) in enumerate(requests):
        expected, tokens = expected_tokens(prompt, max_tokens), answers.get(str(number), [])
        assert tokens == expected[: len(tokens)], "a restart drops the rest"
    assert tokens == expected
    assert manager.num_free_blocks == num_blocks
    assert manager.prefixes.checkpoints.num_used == len(manager.prefixes.checkpoints._index)
