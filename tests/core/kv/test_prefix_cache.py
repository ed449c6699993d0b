"""The hash of a block depends on all tokens before it; blocks are shared within a cache salt and never across."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.kv.block_hashes import block_hash, root_hash
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from support.fakes import collect, expected_tokens, make_engine, make_request, run_to_end

SALTS = [None, "", "a", "b"]


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(SALTS), st.integers(0, 2), st.integers(1, 6), st.integers(0, 3)),
        min_size=2,
        max_size=14,
    ),
    num_blocks=st.integers(9, 40),
)
@settings(max_examples=60, deadline=None)
def test_no_block_crosses_salts(arrivals: list[tuple[str | None, int, int, int]], num_blocks: int) -> None:
    core, manager, _, _ = make_engine(num_blocks=num_blocks, block_size=2, max_num_seqs=4)
    salt_of_hash: dict[bytes, str | None] = {}
    answers: dict[str, list[int]] = {}
    expected = {}
    prompts = [[1] * 12, [1] * 8 + [2] * 3, [3] * 9]
    for index, (salt, which, max_tokens, num_steps) in enumerate(arrivals):
        name = str(index)
        core.add(make_request(name, prompts[which], max_tokens, cache_salt=salt))
        expected[name] = expected_tokens(prompts[which], max_tokens)
        for _ in range(num_steps):
            collect(core.step(), answers)
            check_tables(manager, salt_of_hash)
    while core.has_work:
        collect(core.step(), answers)
        check_tables(manager, salt_of_hash)
    assert answers == expected


def check_tables(manager: PagedKVCacheManager, salt_of_hash: dict[bytes, str | None]) -> None:
    """No block is in tables of two salts, and no hash belongs to two salts."""
    salt_of_block: dict[int, str | None] = {}
    for table in manager._tables.values():
        salt = table.request.cache_salt
        for block in table.block_ids[0]:
            assert salt_of_block.setdefault(block, salt) == salt
            found = manager.pool._hashes[block]
            assert found is None or salt_of_hash.setdefault(found, salt) == salt


def test_the_same_salt_shares_and_another_one_does_not() -> None:
    core, _, _, _ = make_engine(block_size=4)
    prompt = list(range(17))
    cached = {}
    for name, salt in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("none1", None), ("none2", None)):
        core.add(make_request(name, prompt, 2, cache_salt=salt))
        while core.has_work:
            for output in core.step():
                cached[name] = cached.get(name, 0) + output.num_cached_tokens
    assert cached == {"a1": 0, "a2": 16, "b1": 0, "none1": 0, "none2": 16}


def test_siblings_share_under_a_salt_without_a_prefix_cache() -> None:
    core, manager, _, _ = make_engine(block_size=4, enable_prefix_caching=False)
    core.add(make_request("r", list(range(8)), 4, cache_salt="a"))
    core.add(make_request("r.1", list(range(8)), 4, leader_id="r", cache_salt="a"))
    core.step()
    core.step()
    assert manager.counts().num_shared_blocks == 1
    run_to_end(core)


def test_hashes_depend_on_salt_adapter_and_all_tokens_before() -> None:
    values = [root_hash(salt) for salt in SALTS]
    assert len(set(values)) == len(SALTS)
    assert values[0] == b""
    values = [root_hash(salt, lora_id) for salt in SALTS for lora_id in (0, 1, 2, 256)]
    assert len(set(values)) == len(values)
    assert block_hash(block_hash(b"", [1, 2]), [3, 4]) != block_hash(block_hash(b"", [1, 9]), [3, 4])
    assert block_hash(b"", [1, 23]) != block_hash(b"", [12, 3])


def test_requests_with_different_adapters_share_no_blocks() -> None:
    core, _, _, _ = make_engine(block_size=4)
    prompt = list(range(17))
    cached = {}
    for name, lora_id in (("a1", 1), ("a2", 1), ("b1", 2), ("none1", 0), ("none2", 0), ("a3", 1)):
        core.add(make_request(name, prompt, 2, lora_id=lora_id))
        while core.has_work:
            for output in core.step():
                cached[name] = cached.get(name, 0) + output.num_cached_tokens
    assert cached == {"a1": 0, "a2": 16, "b1": 0, "none1": 0, "none2": 16, "a3": 16}
