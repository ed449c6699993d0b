"""The unfinished requests of an engine process, which determine what is lost and what is sent again when it dies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.commands import Add
from chairlift.outputs import EngineCoreOutput

MAX_RUNS: Final = 3
"""Number of engine processes that a request is sent to. A process may die of a request before it reports that the
request has started."""


@dataclass(slots=True, eq=False)
class _SiblingGroup:
    """The unfinished requests among siblings."""

    requests: dict[str, EngineRequest] = field(default_factory=dict)
    has_started: bool = False
    num_runs: int = 0


class InFlightRequests:
    """Unfinished requests in order of arrival, siblings together."""

    def __init__(self) -> None:
        self._group_of: dict[str, _SiblingGroup] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    @property
    def waiting(self) -> list[EngineRequest]:
        """Requests of which no token was computed."""
        return [group.requests[rid] for rid, group in self._group_of.items() if not group.has_started]

    @property
    def started(self) -> list[EngineRequest]:
        return [group.requests[rid] for rid, group in self._group_of.items() if group.has_started]

    def add(self, requests: list[EngineRequest], *, is_sent: bool = True) -> None:
        """Add siblings that were sent to the engine, or that wait for a restart."""
        group = _SiblingGroup({request.request_id: request for request in requests}, num_runs=int(is_sent))
        self._group_of.update(dict.fromkeys(group.requests, group))

    def remove(self, request_ids: Iterable[str]) -> None:
        """Remove requests that have finished or were aborted; unknown ids are ignored."""
        for request_id in request_ids:
            group = self._group_of.pop(request_id, None)
            if group is not None:
                del group.requests[request_id]

    def remove_finished(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Remove the requests whose outputs have a finish reason."""
        self.remove([output.request_id for output in outputs if output.finish_reason is not None])

    def mark_started(self, request_ids: Iterable[str]) -> None:
        """Record that the engine is about to compute these requests."""
        for request_id in request_ids:
            if request_id in self._group_of:
                self._group_of[request_id].has_started = True

    def remove_lost(self) -> list[str]:
        """Remove the requests that are lost with a dead engine: those that have started, and those that were sent to
        MAX_RUNS engines. Returns their ids."""
        lost = [rid for rid, group in self._group_of.items() if group.has_started or group.num_runs == MAX_RUNS]
        self.remove(lost)
        return lost

    def clear(self) -> list[str]:
        """Remove all requests; returns their ids."""
        lost = list(self._group_of)
        self.remove(lost)
        return lost

    def make_resend_commands(self) -> list[Add]:
        """Create the commands that send all requests to a new engine, and count one more run of each."""
        groups = dict.fromkeys(self._group_of.values())
        for group in groups:
            group.num_runs += 1
        return [Add.from_siblings(list(group.requests.values())) for group in groups]
