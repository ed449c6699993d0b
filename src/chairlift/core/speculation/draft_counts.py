"""Chooses the number of draft tokens of each request in a step, by the expected rate of output tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from chairlift.step_time import RowTime

MIN_SPEEDUP: Final = 1.02
"""Draft tokens are verified only if they raise the expected rate of output tokens by this factor, because the times of
steps and the rates of acceptance are estimates."""


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The estimated time of a step with draft tokens, and of their proposals.

    Attributes:
        verification: the time of a step by its number of rows; None if it is unknown: then draft tokens are free.
        proposal: the time in which a draft model proposes one token for each of a number of requests; None if
            proposals are free.
    """

    verification: RowTime | None = None
    proposal: RowTime | None = None

    def best_speedup(self, num_rows: int, num_sampled: int, room: int) -> float:
        """The largest factor by which up to `room` >= 1 draft tokens raise the rate of output tokens if all of them are
        accepted."""
        if self.verification is None:
            return MIN_SPEEDUP
        seconds, before = self.verification.seconds, self.verification.seconds(num_rows)
        proposal = 0.0 if self.proposal is None else self.proposal.seconds(1)
        return max(
            (1 + count / num_sampled) * before / (seconds(num_rows + count) + proposal * -(-count // num_sampled))
            for count in range(1, room + 1)
        )


def choose_counts(
    probabilities: Sequence[float], limits: Sequence[int], num_rows: int, num_sampled: int, room: int, cost: DraftCost
) -> list[int]:
    """The number of draft tokens of each request.

    A step with n rows takes T(n) seconds, and the j-th draft token of a request is accepted with probability p^j. Draft
    tokens are added in descending order of that probability. The number of them is the one with the largest rate

        (num_sampled + sum of p^j) / (T(rows) + time of the proposals)

    Args:
        probabilities: for each request the probability p that a draft token is accepted if the ones before it are.
        limits: the maximum number of draft tokens of each request, at least 1.
        num_rows, num_sampled: the rows of the step without draft tokens, and the number of them that sample a token.
        room: the maximum number of draft tokens of all requests.
    """
    if cost.verification is None:
        return _shares(limits, room)
    seconds, proposal = cost.verification.seconds, cost.proposal
    heap = [(-probability, index) for index, probability in enumerate(probabilities)]
    heapify(heap)
    counts = [0] * len(limits)
    num_proposing = [0] * max(limits, default=0)
    expected, proposal_seconds = float(num_sampled), 0.0
    best, best_rate = list(counts), MIN_SPEEDUP * expected / seconds(num_rows)
    for rows in range(num_rows + 1, num_rows + room + 1):
        if not heap:
            break
        negative, index = heappop(heap)
        position = counts[index]
        counts[index] += 1
        expected -= negative
        if proposal is not None:
            others = num_proposing[position]
            num_proposing[position] += 1
            proposal_seconds += proposal.seconds(others + 1) - (proposal.seconds(others) if others else 0.0)
        if (rate := expected / (seconds(rows) + proposal_seconds)) > best_rate:
            best, best_rate = list(counts), rate
        if counts[index] < limits[index]:
            heappush(heap, (negative * probabilities[index], index))
    return best


def _shares(limits: Sequence[int], room: int) -> list[int]:
    """As many draft tokens as there is room for, in the order of the requests."""
    counts = []
    for limit in limits:
        counts.append(min(room, limit))
        room -= counts[-1]
    return counts
