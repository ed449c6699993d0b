"""SiblingGroups agrees with a simple model after any sequence of operations."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chairlift.engine.sibling_groups import SiblingGroup, SiblingGroups, unfinished_ids

REQUEST_IDS = [f"r{index}" for index in range(8)]


class Operations(RuleBasedStateMachine):
    """Applies random operations to SiblingGroups and to a model: the ids of each group, in order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = SiblingGroups[SiblingGroup[int]]()
        self.added: list[SiblingGroup[int]] = []
        self.ids: list[list[str]] = []

    @rule(request_ids=st.lists(st.sampled_from(REQUEST_IDS), min_size=1, max_size=4, unique=True))
    def add(self, request_ids: list[str]) -> None:
        """Some of the ids may be those of earlier groups, which lose them."""
        group = SiblingGroup(dict.fromkeys(request_ids, len(self.added)))
        self.groups.add(group)
        self.ids = [[one for one in ids if one not in request_ids] for ids in self.ids]
        self.added.append(group)
        self.ids.append(request_ids)

    @rule(request_ids=st.lists(st.sampled_from(REQUEST_IDS)))
    def remove(self, request_ids: list[str]) -> None:
        """Ids may be unknown, or occur twice."""
        left = [[one for one in ids if one not in request_ids] for ids in self.ids]
        ended = [index for index, ids in enumerate(self.ids) if ids and not left[index]]
        found = self.groups.remove(request_ids)
        assert sorted(map(self.added.index, found)) == ended
        self.ids = left

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert list(self.groups) == [group for group, ids in zip(self.added, self.ids, strict=True) if ids]
        assert unfinished_ids(self.groups) == [request_id for ids in self.ids for request_id in ids]
        assert len(self.groups) == sum(map(len, self.ids))
        for index, (group, ids) in enumerate(zip(self.added, self.ids, strict=True)):
            assert group.unfinished == dict.fromkeys(ids, index)
            assert all(self.groups.get(request_id) is group for request_id in ids)
        unknown = set(REQUEST_IDS) - set(unfinished_ids(self.groups))
        assert all(self.groups.get(request_id) is None for request_id in unknown)


TestSiblingGroups = Operations.TestCase
