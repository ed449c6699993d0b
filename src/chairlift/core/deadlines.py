"""Deadlines: the requests that have one, in the order in which they expire."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from chairlift.outputs import EngineCoreOutput
from chairlift.request import FinishReason, Request


class Deadlines:
    """A heap of deadlines. That of a request that has finished stays in it until it passes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request: Request) -> None:
        """Add a request, if it has a deadline."""
        if request.deadline is not None:
            heappush(self._heap, (request.deadline, request.request_id))

    def pop_expired(self, unfinished: Mapping[str, Request], now: float) -> list[Request]:
        """Remove the deadlines that have passed, and return the unfinished requests among those that had them."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            request = unfinished.get(heappop(self._heap)[1])
            # The id may have been used again, for a request with another deadline.
            if request is not None and request.deadline is not None and request.deadline <= now:
                expired.append(request)
        return expired


def timeout_output(request: Request) -> EngineCoreOutput:
    """The last output of a request whose deadline has passed."""
    assert request.deadline is not None
    seconds = round(request.deadline - request.arrival_time, 3)
    if seconds > 0:
        problem = f"the timeout of {seconds:g} s passed after {request.num_output_tokens} output tokens"
    else:
        problem = "the timeout passed before the request reached the engine"
    return EngineCoreOutput(
        request.request_id,
        [],
        finish_reason=FinishReason.TIMEOUT.value,
        num_preemptions=request.num_preemptions,
        error=f"{problem}: increase timeout, or reduce max_tokens",
        error_param="timeout",
    )
