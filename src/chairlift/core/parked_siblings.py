"""Siblings: requests for several answers to one prompt (`n` > 1), which share the blocks of that prompt."""

from __future__ import annotations

from chairlift.request import Request, RequestStatus


class ParkedSiblings:
    """Siblings that wait outside the queue until their leader has computed the prompt."""

    def __init__(self) -> None:
        self._by_leader: dict[str, dict[str, Request]] = {}

    def park(self, request: Request, leader_id: str) -> None:
        request.status = RequestStatus.PARKED
        request.leader_id = leader_id
        self._by_leader.setdefault(leader_id, {})[request.request_id] = request

    def discard(self, request: Request) -> None:
        """Remove a request that has finished, if it is parked."""
        assert request.leader_id is not None
        siblings = self._by_leader.get(request.leader_id, {})
        siblings.pop(request.request_id, None)
        if not siblings:
            self._by_leader.pop(request.leader_id, None)

    def release(self, leader: Request) -> list[Request]:
        """Remove and return the siblings that may join the queue: all, if the leader's prompt is computed. Otherwise
        the leader finished early; the first sibling becomes the new leader, and the others wait for it."""
        siblings = list(self._by_leader.pop(leader.request_id, {}).values())
        if leader.num_computed_tokens >= leader.num_prompt_tokens or not siblings:
            return siblings
        new_leader, *others = siblings
        for sibling in others:
            self.park(sibling, new_leader.request_id)
        return [new_leader]
