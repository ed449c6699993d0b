"""AcceptanceEstimates: the probability that a draft token is accepted, from recent proposals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MEMORY: Final = 0.95
"""The weight of a result, compared to the next one of the same request."""

OVERALL_MEMORY: Final = 0.995
"""The weight of a result, compared to the next one of any request."""

PRIOR_PROBABILITY: Final = 0.5
PRIOR_WEIGHT: Final = 2.0
"""A request without results has the average of all requests; it counts as this number of results."""

NUM_CLASSES: Final = 4

FADING: Final = 0.98
"""The weight of the results of a request, compared to a step later, if no proposal was made in it."""


class _Average:
    """A weighted share of accepted draft tokens, in which older results count less."""

    __slots__ = ("_accepted", "_memory", "_tried")

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._accepted = 0.0
        self._tried = 0.0

    def add(self, num_accepted: int, num_tried: int) -> None:
        faded = self._memory**num_tried
        self._accepted = self._accepted * faded + num_accepted
        self._tried = self._tried * faded + num_tried

    def fade(self, weight: float) -> None:
        self._accepted *= weight
        self._tried *= weight

    def value(self, prior: float) -> float:
        return (self._accepted + PRIOR_WEIGHT * prior) / (self._tried + PRIOR_WEIGHT)


class AcceptanceEstimates:
    """Estimates for each request, separately for proposals with a short and a long match.

    A long match predicts the next tokens far better than a short one: its class is the order of magnitude of its length
    (up to 3, 7 and 15 tokens, or more).
    """

    def __init__(self) -> None:
        self._overall = [_Average(OVERALL_MEMORY) for _ in range(NUM_CLASSES)]
        self._by_request: dict[str, list[_Average]] = {}

    def record(self, request_id: str, match_length: int, num_accepted: int, num_tried: int) -> None:
        """Add the result of a proposal: `num_tried` tokens were compared, and all but the last one are accepted, or all
        of them."""
        index = _match_class(match_length)
        averages = self._by_request.get(request_id)
        if averages is None:
            averages = self._by_request[request_id] = [_Average(MEMORY) for _ in range(NUM_CLASSES)]
        averages[index].add(num_accepted, num_tried)
        self._overall[index].add(num_accepted, num_tried)

    def probability(self, request_id: str, match_length: int) -> float:
        """The estimated probability that a draft token is accepted if the ones before it are."""
        index = _match_class(match_length)
        overall = self._overall[index].value(PRIOR_PROBABILITY)
        averages = self._by_request.get(request_id)
        return overall if averages is None else averages[index].value(overall)

    def fade(self, request_ids: Sequence[str]) -> None:
        """Let older results of these requests, which have no proposal in a step, count less, and the average of all
        requests if there are any of them. After many such steps another try is worth its cost."""
        averages = [average for request_id in request_ids for average in self._by_request.get(request_id, ())]
        for average in (*averages, *(self._overall if request_ids else ())):
            average.fade(FADING)

    def forget(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)


def _match_class(match_length: int) -> int:
    return min(max(match_length.bit_length() - 2, 0), NUM_CLASSES - 1)
