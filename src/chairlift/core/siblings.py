"""Answers to the same prompt (`n` > 1): they wait until one of them has computed it, then share its blocks."""

from __future__ import annotations

from chairlift.request import Request, RequestStatus


class SiblingGate:
    """Requests parked behind their leader, out of the queue, so that nobody waits behind them."""

    def __init__(self) -> None:
        self._parked: dict[str, dict[str, Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._parked.values()))

    def __contains__(self, leader: Request) -> bool:
        """Whether anybody waits for this leader."""
        return leader.request_id in self._parked

    def park(self, request: Request, leader_id: str) -> None:
        request.status = RequestStatus.PARKED
        request.leader_id = leader_id
        self._parked.setdefault(leader_id, {})[request.request_id] = request

    def discard(self, request: Request) -> None:
        """A parked request is gone."""
        assert request.leader_id is not None
        siblings = self._parked[request.leader_id]
        del siblings[request.request_id]
        if not siblings:
            del self._parked[request.leader_id]

    def release(self, leader: Request) -> list[Request]:
        """Who may queue now: all, if the leader's prompt is computed; if the leader is gone before that, the next one
        leads the others."""
        siblings = list(self._parked.pop(leader.request_id).values())
        if leader.num_computed_tokens >= leader.num_prompt_tokens:
            return siblings
        heir, *others = siblings
        for sibling in others:
            self.park(sibling, heir.request_id)
        return [heir]
