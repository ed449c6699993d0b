"""Policies outside of the package, which an option names as module:Class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chairlift.config import SCHEDULING_POLICIES, EngineConfig, SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.core.queues.queue_selection import QUEUES as QUEUES_BY_NAME
from chairlift.engine.explanation.explained_span import describe_preemption
from chairlift.errors import ConfigError
from chairlift.events import Step
from chairlift.lab.bench.policies import parse_policy
from chairlift.lab.sim.simulator import SimConfig
from chairlift.policy_class import default_length_predictor, is_fair, uses_priority
from support.explained import explain
from support.fakes import expected_tokens, make_engine, make_request, run_to_end
from support.tracked_engine import TrackedEngine

QUEUES = """
from chairlift.core.queues.fair_queue import FairQueue
from chairlift.core.queues.request_queue import RequestQueue
from chairlift.core.queues.shortest_remaining import ShortestRemainingQueue

class ShortestPrompt(RequestQueue):
    def key(self, request):
        return (request.num_prompt_tokens, 0, request.arrival_index)

class LastTenant(FairQueue):
    pass

class LeastWork(ShortestRemainingQueue):
    pass
"""

MEMORY = """
from chairlift.core.baselines.reservations import ReservationKVCacheManager
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager

class Halves(ReservationKVCacheManager):
    def reserved_slots(self, request):
        return self.max_model_len // 2

class Unfinished(ReservationKVCacheManager):
    pass

class Other(KVCacheManager):
    def __init__(self, arena, block_size, max_model_len):
        self.num_blocks, self.block_size = arena.num_blocks, block_size

class OneAtATime(PagedKVCacheManager):
    def allocate(self, request):
        return super().allocate(request) if self.is_empty else None
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_queues.py").write_text(QUEUES)
    (tmp_path / "own_memory.py").write_text(MEMORY)
    (tmp_path / "own_fault.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_the_key_of_an_own_queue_is_the_order_of_the_engine_and_of_explanations() -> None:
    engine = TrackedEngine(max_num_seqs=1, scheduling_policy="own_queues:ShortestPrompt")
    running = engine.add([1] * 4, max_tokens=6)
    engine.steps(1)
    waiting = [engine.add([index] * length) for index, length in enumerate((9, 3, 6), start=2)]
    engine.steps(1)
    assert [explain(engine, name).position for name in waiting] == [2, 0, 1]
    text = explain(engine, waiting[0]).waits[0].spans[-1].text
    assert "at the head of the queue, which has a smaller key in own_queues:ShortestPrompt: the only seat" in text
    engine.to_end()
    admitted = [name for event in engine.log.events if isinstance(event, Step) for name in event.admitted]
    assert admitted == [running, waiting[1], waiting[2], waiting[0]]


def test_an_own_queue_of_tenants_is_explained_as_fair() -> None:
    engine = TrackedEngine(max_num_seqs=1, scheduling_policy="own_queues:LastTenant")
    engine.add([1] * 4, max_tokens=6, tenant="a")
    engine.steps(1)
    own, other = engine.add([2] * 4, tenant="a"), engine.add([3] * 4, tenant="b")
    engine.steps(3)
    assert explain(engine, own).waits[0].spans[-1].reason == "fairness"
    assert [explain(engine, name).position for name in (own, other)] == [1, 0]


def test_a_queue_derived_from_srpt_has_predictions() -> None:
    name = "own_queues:LeastWork"
    limits = EngineConfig(scheduling_policy=name).scheduler_config(64)
    assert limits.length_predictor == "history"
    with pytest.raises(ConfigError, match=f"{name} orders requests by predicted output lengths"):
        replace(limits, length_predictor="none")
    core, _, _, _ = make_engine(scheduling_policy=name)
    core.add(make_request("one", [1] * 4, max_tokens=8))
    assert run_to_end(core) == {"one": expected_tokens([1] * 4, 8)}


def test_only_a_class_with_an_order_by_priority_accepts_priorities() -> None:
    assert uses_priority("own_queues:LastTenant")
    assert not uses_priority("own_queues:ShortestPrompt")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LeastWork", "which own_queues:LeastWork prefers, or because it was ahead of its reader, or had"),
        ("ShortestPrompt", "because it was ahead of its reader, or had"),
    ],
)
def test_a_lost_seat_under_pacing_is_explained_by_an_own_queue_that_displaces(name: str, reason: str) -> None:
    text = describe_preemption("r3", f"own_queues:{name}", is_paced=True)
    assert text.startswith(f"preempted: its seat was given to r3, {reason}")


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_a_queue_of_the_package_has_the_same_properties_by_its_name_and_by_its_class(policy: str) -> None:
    own = f"{QUEUES_BY_NAME[policy].__module__}:{QUEUES_BY_NAME[policy].__name__}"
    for of_policy in (default_length_predictor, is_fair, uses_priority):
        assert of_policy(policy) == of_policy(own)


@pytest.mark.parametrize("kv", ["own_memory:Halves", "own_memory:OneAtATime"])
def test_own_memory_gives_the_same_tokens(kv: str) -> None:
    core, manager, _, events = make_engine(kv=kv, num_blocks=64, max_model_len=64)
    for index in range(5):
        core.add(make_request(str(index), [index + 1] * 20, max_tokens=8))
    outputs = run_to_end(core)
    assert outputs == {str(index): expected_tokens([index + 1] * 20, 8) for index in range(5)}
    assert manager.is_empty
    most = max(event.num_running for event in events.events if isinstance(event, Step))
    assert most == (5 if kv.endswith("Halves") else 1)


def test_paged_memory_of_ones_own_has_a_prefix_cache_and_reservations_have_none() -> None:
    assert EngineConfig(kv="own_memory:OneAtATime").has_prefix_cache
    assert not EngineConfig(kv="own_memory:Halves", kv_arena="first-fit").has_prefix_cache


@pytest.mark.parametrize(
    ("kv", "arena"), [("Halves", "buddy"), ("OneAtATime", None), ("Other", None), ("paged", None), ("exact", "buddy")]
)
def test_only_reservations_record_an_arena(kv: str, arena: str | None) -> None:
    pool = KVPool(64, 4, 64, f"own_memory:{kv}" if kv[0].isupper() else kv)
    assert SimConfig(SchedulerConfig(max_model_len=64), pool).engine_started().kv_arena == arena


def test_parts_of_a_compared_policy_are_found_by_their_base() -> None:
    queue, memory = "own_queues:ShortestPrompt", "own_memory:Halves"
    for name, kv, order, predictor in (
        (queue, "paged", queue, None),
        (memory, memory, None, None),
        (f"static/{memory}/{queue}:history:0.9", memory, queue, "history:0.9"),
    ):
        policy = parse_policy(name)
        assert (policy.name, policy.kv, policy.scheduling_policy, policy.length_predictor) == (
            name,
            kv,
            order,
            predictor,
        )
    for name in (f"{queue}/{memory}", f"{memory}:history", f"paged/{memory}"):
        with pytest.raises(ConfigError, match="is unknown: write paged"):
            parse_policy(name)


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("scheduling_policy", "own_absent:Queue", "module 'own_absent' cannot be imported (ModuleNotFoundError"),
        ("scheduling_policy", "own_fault:Queue", "module 'own_fault' cannot be imported (ZeroDivisionError"),
        ("scheduling_policy", "own_queues:Longest", "its classes are ShortestPrompt, LastTenant, LeastWork"),
        ("scheduling_policy", "own_memory:Halves", "no class 'Halves' that is derived from chairlift.core.queues."),
        ("scheduling_policy", "shortest", "mlfq, dlpm, edf, or module:Class, got 'shortest'"),
        ("kv", "own_memory:Unfinished", "is abstract, and does not define reserved_slots: name a class that defines"),
        ("kv", "own_memory:KVCacheManager", "KVCacheManager is a Protocol: name a class that defines all methods"),
        ("kv", "own_queues:LastTenant", "is derived from chairlift.core.kv.kv_cache_manager.KVCacheManager"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(option: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as failed:
        EngineConfig(**{option: name})
    assert message in str(failed.value)
