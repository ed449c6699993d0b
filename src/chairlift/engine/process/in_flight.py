"""What a front end has asked of its engine and not got yet, so that it knows what a death of the engine costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.commands import Add
from chairlift.outputs import EngineCoreOutput

MAX_RUNS: Final = 3
"""Engines that a request is given to. One that dies before it says what it computes may have died of any of them."""


@dataclass(slots=True)
class _Group:
    """The unfinished ones among siblings."""

    requests: dict[str, EngineRequest] = field(default_factory=dict)
    has_begun: bool = False
    num_runs: int = 0


class InFlightRequests:
    """Unfinished requests in order of arrival, siblings together."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    @property
    def waiting(self) -> list[EngineRequest]:
        """Those of which nothing was computed."""
        return [r for group in self._groups.values() if not group.has_begun for r in group.requests.values()]

    @property
    def begun(self) -> list[EngineRequest]:
        return [r for group in self._groups.values() if group.has_begun for r in group.requests.values()]

    def add(self, requests: list[EngineRequest], *, is_sent: bool = True) -> None:
        """Siblings were sent, or wait for an engine."""
        leader = requests[0].request_id
        self._groups[leader] = _Group({request.request_id: request for request in requests}, num_runs=int(is_sent))
        self._group_of.update((request.request_id, leader) for request in requests)

    def remove(self, request_ids: Iterable[str]) -> None:
        """They ended, or nobody wants them."""
        for request_id in request_ids:
            leader = self._group_of.pop(request_id, None)
            if leader is None:
                continue
            group = self._groups[leader]
            del group.requests[request_id]
            if not group.requests:
                del self._groups[leader]

    def begin(self, request_ids: Iterable[str]) -> None:
        """They are about to be computed."""
        for request_id in request_ids:
            leader = self._group_of.get(request_id)
            if leader is not None:
                self._groups[leader].has_begun = True

    def note(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Some may have ended."""
        ended = [output.request_id for output in outputs if output.finish_reason is not None]
        if ended:
            self.remove(ended)

    def lose_begun(self) -> list[str]:
        """The engine is gone: forgets those that had begun, or were given to MAX_RUNS engines; returns their ids."""
        lost: list[str] = []
        for group in self._groups.values():
            if group.has_begun or group.num_runs == MAX_RUNS:
                lost += group.requests
        self.remove(lost)
        return lost

    def lose_all(self) -> list[str]:
        """Forget all requests; returns their ids."""
        lost = list(self._group_of)
        self.remove(lost)
        return lost

    def again(self) -> list[Add]:
        """What is sent to a new engine."""
        for group in self._groups.values():
            group.num_runs += 1
        return [Add.of(list(group.requests.values())) for group in self._groups.values()]
