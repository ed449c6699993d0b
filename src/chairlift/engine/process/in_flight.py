"""The unfinished requests of an engine process, which determine what is lost and what is sent again when it dies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.commands import Add
from chairlift.engine.sibling_groups import SiblingGroup, SiblingGroups, unfinished_ids

MAX_RUNS: Final = 3
"""Number of engines that a request is sent to. An engine may die of a request before it reports that the request has
started."""


@dataclass(slots=True, eq=False)
class InFlightGroup(SiblingGroup[EngineRequest]):
    """Siblings that are sent to an engine together.

    Attributes:
        num_runs: the number of engines that they were sent to.
        has_started: a token of one of them was computed, or is about to be.
    """

    num_runs: int = field(default=0, kw_only=True)
    has_started: bool = field(default=False, kw_only=True)

    @property
    def is_lost(self) -> bool:
        """Whether they end with their engine if it dies, instead of being sent to another one."""
        return self.has_started or self.num_runs >= MAX_RUNS


class InFlightRequests(SiblingGroups[InFlightGroup]):
    """Unfinished requests in order of arrival, siblings together."""

    def add_siblings(self, requests: list[EngineRequest], *, is_sent: bool = True) -> None:
        """Add siblings that were sent to the engine, or that wait for a restart."""
        self.add(InFlightGroup({request.request_id: request for request in requests}, num_runs=int(is_sent)))

    def mark_started(self, request_ids: Iterable[str]) -> None:
        """Record that the engine is about to compute these requests."""
        for request_id in request_ids:
            if (group := self.get(request_id)) is not None:
                group.has_started = True

    def remove_lost(self) -> list[str]:
        """Remove the requests that are lost with a dead engine, and return their ids."""
        lost = unfinished_ids(group for group in self if group.is_lost)
        self.remove(lost)
        return lost

    def make_resend_commands(self) -> list[Add]:
        """Create the commands that send all requests to a new engine, and count one more run of each."""
        for group in self:
            group.num_runs += 1
        return [Add.from_siblings(list(group.unfinished.values())) for group in self]
