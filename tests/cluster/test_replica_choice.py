"""The choice of a replica: cached prefixes against load, and prompts of different tenants."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chairlift.cluster.replica_choice import choose_replica, cost
from chairlift.cluster.replica_state import ReplicaLoad, ReplicaState, RoutedPrompt

BLOCK_SIZE = 4
TOKENS = list(range(100, 121))


def make_replicas(num_replicas: int, num_blocks: int = 64) -> dict[str, ReplicaState]:
    return {f"r{index}": ReplicaState(BLOCK_SIZE, num_blocks) for index in range(num_replicas)}


def make_prompt(tokens: list[int], salt: str | None = None, lora_id: int = 0) -> RoutedPrompt:
    return RoutedPrompt.from_tokens(tokens, BLOCK_SIZE, salt, lora_id)


def test_the_replica_with_the_cached_prefix_is_chosen() -> None:
    replicas, prompt = make_replicas(4), make_prompt(TOKENS)
    replicas["r2"].change_cache(prompt.block_keys[:3], ())
    assert replicas["r2"].num_cached_tokens(prompt) == 12
    assert {choose_replica(replicas, prompt, random.Random(seed)) for seed in range(20)} == {"r2"}


def test_a_loaded_replica_loses_its_cached_prefix() -> None:
    replicas, prompt = make_replicas(2), make_prompt(TOKENS)
    replicas["r0"].change_cache(prompt.block_keys, ())
    replicas["r0"].others = ReplicaLoad(queued_tokens=19, free_blocks=64)
    assert choose_replica(replicas, prompt, random.Random(0)) == "r0"
    replicas["r0"].others = ReplicaLoad(queued_tokens=21, free_blocks=64)
    assert choose_replica(replicas, prompt, random.Random(0)) == "r1"


def test_a_session_stays_until_the_loads_differ_by_the_bound() -> None:
    """It would lose 20 cached tokens, so it stays up to a difference of 4 * 20."""
    replicas, first = make_replicas(2), make_prompt(TOKENS[:20])
    replicas["r0"].add("turn", first)
    replicas["r0"].remove("turn")
    replicas["r0"].change_cache(first.block_keys, ())
    turn = make_prompt(TOKENS)
    for queued, chosen in ((80, "r0"), (81, "r1")):
        replicas["r0"].others = ReplicaLoad(queued_tokens=queued, free_blocks=64)
        assert {choose_replica(replicas, turn, random.Random(seed)) for seed in range(20)} == {chosen}
    replicas["r0"].change_cache((), first.block_keys[-1:])
    replicas["r0"].others = ReplicaLoad(queued_tokens=40, free_blocks=64)
    assert choose_replica(replicas, turn, random.Random(0)) == "r1", "the end of its prefix was evicted"


def test_a_common_beginning_is_not_a_session() -> None:
    replicas, first, other = make_replicas(1), make_prompt([*TOKENS, 1, 2, 3]), make_prompt([*TOKENS, 4, 5, 6, 7])
    state = replicas["r0"]
    state.add("a", first)
    assert state.has_session(make_prompt([*TOKENS, 1, 2, 3, 9, 9]))
    assert not state.has_session(other)
    assert not state.has_session(make_prompt(TOKENS))


def test_the_remembered_ends_of_prompts_are_bounded() -> None:
    state, cached = ReplicaState(BLOCK_SIZE, 4), make_prompt(TOKENS)
    state.add("cached", cached)
    state.change_cache(cached.block_keys, ())
    state.remove("cached")
    for number in range(40):
        state.add("aborted", make_prompt([number] * BLOCK_SIZE))
        state.remove("aborted")
        assert len(state._ends) <= 5
    assert state.has_session(cached)
    assert not state.has_session(make_prompt([0] * BLOCK_SIZE))


def test_a_replica_without_free_blocks_is_avoided() -> None:
    replicas, prompt = make_replicas(2), make_prompt(TOKENS)
    replicas["r0"].others = ReplicaLoad(free_blocks=2)
    assert {choose_replica(replicas, prompt, random.Random(seed)) for seed in range(20)} == {"r1"}


def test_prefixes_of_other_salts_and_adapters_do_not_match() -> None:
    replicas = make_replicas(1)
    replicas["r0"].change_cache(make_prompt(TOKENS).block_keys, ())
    assert replicas["r0"].num_cached_tokens(make_prompt(TOKENS)) == 20
    assert replicas["r0"].num_cached_tokens(make_prompt(TOKENS, salt="tenant")) == 0
    assert replicas["r0"].num_cached_tokens(make_prompt(TOKENS, lora_id=1)) == 0


def test_a_hole_in_the_cached_prefix_ends_it() -> None:
    replicas, prompt = make_replicas(1), make_prompt(TOKENS)
    state = replicas["r0"]
    state.change_cache([*prompt.block_keys[:1], *prompt.block_keys[2:]], ())
    assert state.num_cached_tokens(prompt) == 4
    state.change_cache((), prompt.block_keys[:1])
    assert state.num_cached_tokens(prompt) == 0


def test_requests_on_the_way_count_before_the_next_update() -> None:
    """A burst with one system prompt computes it once, as long as the replica is not overloaded."""
    replicas = make_replicas(3)
    first = make_prompt(TOKENS)
    chosen = choose_replica(replicas, first, random.Random(1))
    replicas[chosen].add("a", first)
    assert replicas[chosen].queued_tokens == 21
    replicas[chosen].record_output("a")
    again = make_prompt([*TOKENS[:16], 1, 2, 3, 4, 5])
    assert replicas[chosen].num_cached_tokens(again) == 16
    assert choose_replica(replicas, again, random.Random(2)) == chosen


def test_routers_with_a_common_prefix_everywhere_spread_the_load() -> None:
    """All routers have the same information: each replica has the system prompt, and r0 is the least loaded."""
    replicas, prompt = make_replicas(8), make_prompt(TOKENS)
    for index, state in enumerate(replicas.values()):
        state.change_cache(prompt.block_keys[:2], ())
        state.others = ReplicaLoad(num_unfinished=index, free_blocks=64)
    counts = Counter(choose_replica(replicas, prompt, random.Random(seed)) for seed in range(400))
    assert counts["r0"] == pytest.approx(100, abs=25)  # 1/4 of all pairs contain it
    assert len(counts) == 7  # the most loaded one loses against any other


def test_four_candidates_at_most_and_the_cheapest_of_them() -> None:
    """With equal loads the longest prefix wins; behind a long queue, one of two others without a queue."""
    replicas, prompt = make_replicas(9), make_prompt(TOKENS)
    for name in ("r2", "r5", "r7"):
        replicas[name].change_cache(prompt.block_keys[:4], ())
    replicas["r1"].change_cache(prompt.block_keys[:3], ())
    assert {choose_replica(replicas, prompt, random.Random(seed)) for seed in range(60)} == {"r2", "r5", "r7"}
    for name in ("r2", "r5", "r7"):
        replicas[name].others = ReplicaLoad(queued_tokens=1000, free_blocks=64)
    assert {choose_replica(replicas, prompt, random.Random(seed)) for seed in range(60)} == {
        name for name in replicas if name not in ("r2", "r5", "r7")
    }


def test_a_block_behind_a_hole_is_no_prefix() -> None:
    replicas, prompt = make_replicas(3), make_prompt(TOKENS)
    replicas["r0"].change_cache(prompt.block_keys[:3], ())
    replicas["r1"].change_cache(prompt.block_keys[2:], ())
    replicas["r2"].change_cache(prompt.block_keys[3:], ())
    assert {choose_replica(replicas, prompt, random.Random(seed)) for seed in range(20)} == {"r0"}


def test_load_is_spread_without_cached_prefixes() -> None:
    replicas, source = make_replicas(4, 10_000), random.Random(3)
    for index in range(400):
        prompt = make_prompt([index * 50 + offset for offset in range(20)])
        replicas[choose_replica(replicas, prompt, source)].add(str(index), prompt)
    counts = sorted(state.num_unfinished for state in replicas.values())
    assert counts[0] >= 90
    assert counts[-1] <= 110


@given(st.lists(st.tuples(st.sampled_from(["add", "output", "remove"]), st.integers(0, 5)), max_size=60))
def test_the_accounting_of_a_replica_returns_to_zero(actions: list[tuple[str, int]]) -> None:
    """Whatever the order of calls, nothing is left of requests that have ended."""
    state, known = ReplicaState(BLOCK_SIZE, 64), dict[str, RoutedPrompt]()
    for number, (action, index) in enumerate(actions):
        if action == "add":
            request_id = f"{index}.{number}"
            known[request_id] = make_prompt(list(range(index * 3 + 1)))
            state.add(request_id, known[request_id])
        for request_id in [each for each in known if each.startswith(f"{index}.")]:
            if action == "output":
                state.record_output(request_id)
            elif action == "remove":
                state.remove(request_id)
                del known[request_id]
        assert state.queued_tokens >= 0
        assert state.num_unfinished == len(known)
    for request_id in known:
        state.remove(request_id)
    assert (state.queued_tokens, state.num_unfinished) == (0, 0)
    assert state.num_cached_tokens(make_prompt(TOKENS)) == 0


class BlocksOfReplica(RuleBasedStateMachine):
    """The known blocks of a replica are those that it has published and those of unfinished requests."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ReplicaState(BLOCK_SIZE, 64)
        self.cached: set[int] = set()
        self.sent: dict[str, RoutedPrompt] = {}

    @rule(stored=st.sets(st.integers(0, 6)), removed=st.sets(st.integers(0, 6)))
    def change(self, stored: set[int], removed: set[int]) -> None:
        self.state.change_cache(stored, removed)
        self.cached = (self.cached - removed) | stored

    @rule(name=st.sampled_from("abc"), keys=st.lists(st.integers(0, 6), unique=True))
    def add(self, name: str, keys: list[int]) -> None:
        if name not in self.sent:
            self.sent[name] = RoutedPrompt(30, tuple(keys))
            self.state.add(name, self.sent[name])

    @rule(name=st.sampled_from("abc"))
    def remove(self, name: str) -> None:
        self.state.remove(name)
        self.sent.pop(name, None)

    @invariant()
    def known_blocks(self) -> None:
        expected = self.cached.union(*(prompt.block_keys for prompt in self.sent.values()))
        assert {key for key in range(7) if self.state.has_block(key)} == expected


TestBlocksOfReplica = BlocksOfReplica.TestCase
TestBlocksOfReplica.settings = settings(max_examples=30)


def test_the_cost_is_the_uncached_work_of_an_idle_replica() -> None:
    assert cost(ReplicaState(BLOCK_SIZE, 64), make_prompt(TOKENS), 8) == 13
