"""One request as the tracker knows it: its waits, its progress, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from chairlift.events import RequestArrived, RequestFinished, RequestWaiting
from chairlift.observability.queue_timeline import Stretch

RequestState = Literal["waiting", "running", "finished", "rejected", "lost"]


class Span(NamedTuple):
    """A part of a wait with one reason.

    A step's decision holds until the next step is planned; `num_steps` counts the decisions. `reason` is one of
    `request.WaitReason`, or

    - "next_step": handed over to the engine, which was computing a step,
    - "restart": the engine was being started again,
    - "unknown": the events of these steps were lost.

    Attributes:
        start, end: seconds of the engine's clock; a span begins exactly where the one before it ends.
        stretches: of the queue's timeline that it is made of, in order; of a wait that is over, the telling one.
    """

    reason: str
    start: float
    end: float
    num_steps: int
    stretches: tuple[Stretch, ...] = ()

    def telling(self, request_id: str) -> tuple[Stretch, ...]:
        """The first stretch in which the request was at the head itself; the first one of all otherwise."""
        own = (stretch for stretch in self.stretches if stretch.head_id == request_id)
        first = next(own, next(iter(self.stretches), None))
        return () if first is None else (first,)


@dataclass(slots=True)
class Wait:
    """From its arrival, or from a preemption, until it is admitted or gone.

    Attributes:
        first_step: that it could have been in; end_step: that it is in, or the first one planned after it was gone.
        queued_step: the first one for which it was in the queue, after its leader's prefill; None while it is parked.
        spans: kept once it is over and all of its steps are known.
    """

    start: float
    first_step: int
    queued_step: int | None
    end: float | None = None
    end_step: int | None = None
    is_restart: bool = False
    spans: list[Span] | None = None


@dataclass(slots=True)
class TrackedRequest:
    """What is known of a request.

    Attributes:
        waits: in order; the first one is its queue time.
        num_computed: tokens with K and V; num_blocks: held, shared ones included.
        num_steps, step_seconds, step_tokens: the steps that it was in, how long they took, and its tokens in them.
        recompute_tokens: computed again after preemptions.
        first_refusal: why it was not admitted when it was first at the head of the queue.
    """

    index: int
    arrived: RequestArrived
    waits: list[Wait]
    state: RequestState = "waiting"
    num_computed: int = 0
    num_blocks: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    recompute_until: int = 0
    recompute_tokens: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: RequestFinished | None = None
    rejection_message: str | None = None
    num_steps: int = 0
    step_seconds: float = 0.0
    step_tokens: int = 0
    padding_tokens: int = 0
    refusal: RequestWaiting | None = None
    first_refusal: RequestWaiting | None = None
    last_token: float | None = None

    @property
    def request_id(self) -> str:
        return self.arrived.request_id

    @property
    def tenant(self) -> str:
        return self.arrived.tenant

    @property
    def limit(self) -> int:
        """Output tokens that it will have at most."""
        return self.arrived.max_tokens if self.arrived.output_len is None else self.arrived.output_len

    @property
    def end_step(self) -> int | None:
        return None if self.finished is None else self.finished.step

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrived.time

    def take_row(self, start: int, count: int, num_new: int, padding: int, seconds: float, time: float) -> None:
        """It was in a step."""
        end = start + count
        self.num_computed = end
        self.num_steps += 1
        self.step_seconds += seconds
        self.step_tokens += count
        self.padding_tokens += padding
        self.recompute_tokens += max(0, min(end, self.recompute_until) - start)
        if num_new:
            self.num_output_tokens += num_new
            self.first_token = time if self.first_token is None else self.first_token
            self.last_token = time

    def preempt(self, step: int, time: float) -> None:
        self.recompute_until = max(self.recompute_until, self.num_computed)
        self.num_computed = self.num_blocks = 0
        self.num_preemptions += 1
        self.waits.append(Wait(time, step, step))
        self.state = "waiting"
        if self.finished is not None:
            self.end(self.finished)

    def admit(self, step: int, time: float, num_cached: int) -> None:
        wait = self.waits[-1]
        wait.end, wait.end_step, wait.spans = time, step, None
        if wait.queued_step is None:
            wait.queued_step = step
        if self.first_scheduled is None:
            self.first_scheduled = time
            self.num_cached_tokens = num_cached
        if self.finished is None:
            self.state = "running"

    def end(self, event: RequestFinished) -> None:
        """It left. A step that was planned before may still be told of."""
        self.finished = event
        self.state = "finished"
        wait = self.waits[-1]
        if wait.end is None:
            wait.end, wait.end_step = max(event.time, wait.start), event.step
