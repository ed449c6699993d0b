"""Pacing: a stream that is ahead of its reader gives its seat to a request that waits.

After Andes (Liu et al., "Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming Services",
2024), where the scheduler also preempts requests whose users have enough text to read.

    tokens                          . ' generated      ahead of its reader by PAUSE_SECONDS: may be paused
                              . ' /                    RESUME_SECONDS before its reader has read all: goes first
                        . '   / read, at a fixed speed
                             first token

A pause is a preemption: seat and memory are free for others, and the K and V remain in the prefix cache as long as no
other request needs the blocks. A sequence that kept its seat would only make the steps of others a little faster,
while the requests that wait for a seat, which gain most, would wait longer.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from chairlift.core.queues.request_queue import Key, RequestQueue
from chairlift.request import Request
from chairlift.step_time import StepTime

PAUSE_SECONDS: Final = 4.0
"""A stream can be paused while its reader needs at least this time for the tokens that it has."""

RESUME_SECONDS: Final = 1.0
"""A paused stream goes first when its reader needs at most this time, or when no other request waits."""


class PacedQueue(RequestQueue):
    """A queue of any policy, without the streams that are ahead of their readers.

    A pause ends at the latest RESUME_SECONDS before the reader has read all tokens: then the request is at the head of
    the queue, and takes the next seat, even the seat of a stream that is ahead of its reader. A request that is not
    streamed has no reader, and is never paused; if it was admitted during a pause, it gives its seat back.

    Args:
        queue: the order of the other requests.
        tokens_per_second: the speed of a reader.
    """

    has_constant_keys = False

    def __init__(self, queue: RequestQueue, tokens_per_second: float) -> None:
        super().__init__()
        self._queue = queue
        self.keeps_tpot = queue.keeps_tpot
        self._speed = tokens_per_second
        self._now = -math.inf
        self._paused: list[tuple[float, int, Request]] = []
        self._reading_since: dict[Request, float] = {}
        self._guests: set[Request] = set()

    def _seconds_ahead(self, request: Request) -> float:
        """The time that the reader needs for the tokens so far, the pending ones included."""
        since = self._reading_since.get(request)
        if since is None:
            return 0.0
        return since + (request.num_tokens - request.num_prompt_tokens) / self._speed - self._now

    def key(self, request: Request) -> Key:
        ahead = self._seconds_ahead(request)
        if ahead >= PAUSE_SECONDS or self._has_seat_of_head(request):
            return math.inf, int(1e3 * ahead), request.arrival_index
        return self._queue.key(request)

    def __len__(self) -> int:
        return len(self._queue) + len(self._paused)

    def begin_step(self, now: float) -> None:
        self._now = now
        self._queue.begin_step(now)

    def push(self, request: Request) -> None:
        seconds = self._seconds_ahead(request) - RESUME_SECONDS
        if seconds > 0:
            insort(self._paused, (self._now + seconds, request.arrival_index, request))
        else:
            self._queue.push(request)

    def peek(self) -> Request | None:
        return self._paused[0][2] if self._has_paused_head() else self._queue.peek()

    def _has_paused_head(self) -> bool:
        return bool(self._paused) and (self._paused[0][0] <= self._now or not self._queue)

    def _has_seat_of_head(self, running: Request) -> bool:
        """Whether a request without a reader was admitted during a pause, and a paused stream is the head now."""
        return running in self._guests and self._has_paused_head()

    def in_order(self) -> Iterator[Request]:
        yield from self._queue.in_order()
        yield from [request for _time, _index, request in self._paused]

    def may_delay(self, request: Request, head: Request) -> bool:
        return self._queue.may_delay(request, head)

    def take(self, request: Request) -> Request:
        is_paused = any(entry[2] is request for entry in self._paused)
        return super().take(request) if is_paused else self._queue.take(request)

    def discard(self, request: Request) -> None:
        kept = [entry for entry in self._paused if entry[2] is not request]
        if len(kept) == len(self._paused):
            self._queue.discard(request)
        self._paused = kept

    def displaces(self, head: Request, running: Request) -> bool:
        if self._seconds_ahead(head) > RESUME_SECONDS:
            return False
        is_paced = self._seconds_ahead(running) >= PAUSE_SECONDS or self._has_seat_of_head(running)
        return is_paced or self._queue.displaces(head, running)

    def record_admission(self, request: Request) -> None:
        if self._paused and not request.sampling_params.is_streamed:
            self._guests.add(request)
        self._queue.record_admission(request)

    def record_sampling(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.sampling_params.is_streamed:
                self._reading_since.setdefault(request, self._now)
        self._queue.record_sampling(requests)

    def record_accepted_drafts(self, request: Request, count: int) -> None:
        self._queue.record_accepted_drafts(request, count)

    def set_step_time(self, step_time: StepTime | None) -> None:
        super().set_step_time(step_time)
        self._queue.set_step_time(step_time)

    def record_remote_service(self, service: Mapping[str, float]) -> None:
        self._queue.record_remote_service(service)

    def forget(self, request: Request) -> None:
        self._reading_since.pop(request, None)
        self._guests.discard(request)
        self._queue.forget(request)
