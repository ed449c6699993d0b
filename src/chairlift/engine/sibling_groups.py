"""SiblingGroups: the requests for the answers to one prompt (`n` > 1), until each of them has ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Member = TypeVar("Member")
Group = TypeVar("Group", bound="SiblingGroup[Any]")


@dataclass(slots=True, eq=False)
class SiblingGroup(Generic[Member]):
    """The requests for the answers to one prompt. `unfinished` has what is kept of each until it ends, by its id."""

    unfinished: dict[str, Member]


class SiblingGroups(Generic[Group]):
    """Groups in order of arrival, found by the ids of their unfinished requests, whose number is the length."""

    def __init__(self) -> None:
        self._group_of: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def __iter__(self) -> Iterator[Group]:
        return iter(dict.fromkeys(self._group_of.values()))

    def add(self, group: Group) -> None:
        """Add a new group. A known id moves to it from its previous group, as when a request is sent again."""
        self.remove(group.unfinished)
        self._group_of.update(dict.fromkeys(group.unfinished, group))

    def get(self, request_id: str) -> Group | None:
        """The group of an unfinished request; None for other ids."""
        return self._group_of.get(request_id)

    def remove(self, request_ids: Iterable[str]) -> list[Group]:
        """Remove requests that have ended, and return the groups that have ended with them; unknown ids are ignored."""
        ended = []
        for request_id in request_ids:
            if (group := self._group_of.pop(request_id, None)) is not None:
                del group.unfinished[request_id]
                if not group.unfinished:
                    ended.append(group)
        return ended


def unfinished_ids(groups: Iterable[SiblingGroup[Any]]) -> list[str]:
    """The ids of the unfinished requests of groups."""
    return [request_id for group in groups for request_id in group.unfinished]
