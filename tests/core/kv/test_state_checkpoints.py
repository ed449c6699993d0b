"""The slots of recurrent states: none is in two uses, and the least useful one is evicted."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift.core.kv.state_checkpoints import MIN_OBSOLETE, StateCheckpoints
from support.kv_invariants import check_checkpoints


def fill(checkpoints: StateCheckpoints, costs: dict[bytes, int]) -> None:
    """Write a checkpoint in each of several steps."""
    for key, cost in costs.items():
        checkpoints.begin_step()
        slot = checkpoints.reserve()
        assert slot is not None
        assert checkpoints.register(slot, key, cost)
    checkpoints.begin_step()


def test_the_checkpoint_that_costs_least_to_compute_again_is_evicted() -> None:
    checkpoints = StateCheckpoints(3)
    fill(checkpoints, {b"long": 1000, b"short": 16, b"middle": 100, b"new": 16})
    assert [key in checkpoints for key in (b"long", b"short", b"middle", b"new")] == [True, False, True, True]


def test_checkpoints_of_equal_cost_are_evicted_in_the_order_of_their_last_use() -> None:
    checkpoints = StateCheckpoints(3)
    fill(checkpoints, {b"a": 16, b"b": 16, b"c": 16})
    checkpoints.read(b"a", 16)
    fill(checkpoints, {b"d": 16})
    assert [key in checkpoints for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_an_expensive_checkpoint_that_is_not_used_is_evicted_in_the_end() -> None:
    checkpoints = StateCheckpoints(2)
    fill(checkpoints, {b"long": 160})
    fill(checkpoints, {bytes([number]): 16 for number in range(10)})
    assert b"long" in checkpoints
    fill(checkpoints, {bytes([number]): 16 for number in range(10, 20)})
    assert b"long" not in checkpoints


def test_slots_of_the_current_step_are_not_evicted() -> None:
    checkpoints = StateCheckpoints(2)
    fill(checkpoints, {b"a": 1, b"b": 2})
    slot = checkpoints.read(b"a", 1)
    first = checkpoints.reserve()
    assert first not in (None, slot)
    assert checkpoints.reserve() is None
    checkpoints.drop(b"a")  # its slot is free, and still read in this step
    assert checkpoints.reserve() is None
    checkpoints.begin_step()
    assert checkpoints.reserve() == slot


def test_the_eviction_order_does_not_grow_with_the_number_of_uses() -> None:
    checkpoints = StateCheckpoints(2)
    fill(checkpoints, {b"a": 1, b"b": 2})
    for _ in range(10 * MIN_OBSOLETE):
        checkpoints.read(b"a", 1)
    assert len(checkpoints._order) <= 4 + MIN_OBSOLETE
    fill(checkpoints, {b"c": 1})
    assert b"b" in checkpoints


class CheckpointMachine(RuleBasedStateMachine):
    """Random uses of the slots. A reserved or read slot is in no other use until the next step."""

    @initialize(num_slots=st.integers(0, 6))
    def start(self, num_slots: int) -> None:
        self.checkpoints = StateCheckpoints(num_slots)
        self.reserved: list[int] = []
        self.content: dict[bytes, int] = {}
        self.used_now: set[int] = set()
        self.count = 0

    @rule()
    def begin_step(self) -> None:
        self.checkpoints.begin_step()
        self.used_now.clear()

    @rule()
    def reserve(self) -> None:
        indexed = {slot for key, slot in self.content.items() if key in self.checkpoints}
        slot = self.checkpoints.reserve()
        if slot is None:
            assert self.used_now | set(self.reserved) == set(range(self.checkpoints.num_slots))
            return
        assert slot not in self.used_now
        assert slot not in self.reserved
        left = {slot for key, slot in self.content.items() if key in self.checkpoints}
        assert indexed - left <= {slot}, "only the checkpoint in this slot is evicted"
        self.reserved.append(slot)
        self.used_now.add(slot)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), key=st.integers(0, 9), cost=st.integers(1, 50))
    def register(self, data: st.DataObject, key: int, cost: int) -> None:
        slot = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(slot)
        name = bytes([key])
        is_new = name not in self.checkpoints
        assert self.checkpoints.register(slot, name, cost) is is_new
        if is_new:
            self.content[name] = slot

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(slot)
        self.checkpoints.release(slot)

    @rule(key=st.integers(0, 9), cost=st.integers(1, 50))
    def read(self, key: int, cost: int) -> None:
        name = bytes([key])
        if name in self.checkpoints:
            slot = self.checkpoints.read(name, cost)
            assert slot == self.content[name]
            self.used_now.add(slot)

    @rule(key=st.integers(0, 9))
    def drop(self, key: int) -> None:
        self.checkpoints.drop(bytes([key]))
        assert bytes([key]) not in self.checkpoints

    @invariant()
    def every_slot_is_in_one_use(self) -> None:
        check_checkpoints(self.checkpoints, self.reserved)


TestCheckpointMachine = CheckpointMachine.TestCase
TestCheckpointMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
