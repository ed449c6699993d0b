"""An engine in virtual time with a RequestTracker, and checks of the waiting times that it computes."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

from chairlift.clock import VirtualClock
from chairlift.core.engine_core import EngineCore
from chairlift.events import EngineStarted, Event, EventList, RequestFinished
from chairlift.observability.tracker import RequestTracker
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput
from support.fakes import CheckingExecutor, make_engine, make_request


class TimedExecutor:
    """Advances the clock by a time that depends on the step."""

    def __init__(self, executor: CheckingExecutor, clock: VirtualClock, base: float = 0.1, per_token: float = 0.01):
        self._executor = executor
        self._clock = clock
        self._costs = base, per_token

    def submit(self, output: SchedulerOutput) -> ModelRunnerOutput:
        base, per_token = self._costs
        tokens = sum(output.num_scheduled_tokens.values()) + sum(output.num_padding_tokens.values())
        self._clock.advance(base + per_token * tokens)
        return self._executor.submit(output)

    def result(self, handle: ModelRunnerOutput) -> ModelRunnerOutput:
        self._clock.advance(0.003)
        return handle


class TrackedEvents(list[Event]):
    """A list of events that passes each event to a tracker."""

    def __init__(self, tracker: RequestTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def append(self, event: Event) -> None:
        super().append(event)
        self._tracker.emit(event)


class TrackedEngine:
    """An engine in virtual time. `tracker` gets each event when it is emitted, as from an EventHub."""

    def __init__(self, steps_ahead: int = 0, **options: Any) -> None:
        core, self.manager, executor, self.log = make_engine(steps_ahead=steps_ahead, **options)
        self.clock = VirtualClock()
        self.core = EngineCore(core.scheduler, TimedExecutor(executor, self.clock), self.clock, steps_ahead)
        self.tracker = RequestTracker()
        self.tracker.emit(started(self.manager, **options))
        self.log.events = TrackedEvents(self.tracker)
        self.count = 0

    def add(self, prompt: list[int], max_tokens: int = 4, late: float = 0.0, tenant: str = "", **options: Any) -> str:
        """Add a request that arrived `late` seconds before it is added to the engine; returns its id."""
        self.count += 1
        request = make_request(f"r{self.count}", prompt, max_tokens, **options)
        request.arrival_time = self.clock.now()
        request.tenant = tenant
        self.clock.advance(late)
        self.core.add(request)
        return request.request_id

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core.step()

    def to_end(self) -> None:
        for _ in range(10_000):
            if not self.core.has_work:
                return
            self.core.step()
        raise AssertionError("no end")


def started(manager: Any, **options: Any) -> EngineStarted:
    checkpoints = options.get("checkpoints")
    return EngineStarted(
        state_bytes=0 if checkpoints is None else 1000,
        num_checkpoints=0 if checkpoints is None else checkpoints.num_slots,
        time=0.0,
        model="fake",
        block_size=manager.block_size,
        num_blocks=manager.num_blocks,
        max_num_seqs=options.get("max_num_seqs", 8),
        max_num_batched_tokens=options.get("max_num_batched_tokens", 32),
        max_model_len=options.get("max_model_len", 256),
        scheduling_policy=options.get("scheduling_policy", "fcfs"),
        length_predictor=options.get("length_predictor", "none"),
        kv=options.get("kv", "paged"),
        enable_prefix_caching=options.get("enable_prefix_caching", True) and options.get("kv", "paged") == "paged",
        pacing_tokens_per_second=options.get("pacing_tokens_per_second"),
        batching=options.get("batching", "continuous"),
        kv_arena=None if options.get("kv", "paged") == "paged" else options.get("arena", "buddy"),
        static_batch_size=min(4, options.get("max_num_seqs", 8)) if options.get("batching") == "static" else None,
    )


def check_waits(tracker: RequestTracker, events: EventList) -> Counter[str]:
    """Check that the spans of finished requests add up to their queue times and to their steps by reason; returns the
    steps by reason of all requests."""
    total: Counter[str] = Counter()
    ended = [event for event in events.events if isinstance(event, RequestFinished)]
    for event in ended:
        request = tracker.get(event.request_id)
        assert request is not None
        waits = tracker.spans(request)
        steps: Counter[str] = Counter()
        for wait, spans in zip(request.waits, waits, strict=True):
            assert wait.end is not None
            assert sum(Fraction(s.end) - Fraction(s.start) for s in spans) == Fraction(wait.end) - Fraction(wait.start)
            assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
            assert all(a.reason != b.reason for a, b in pairwise(spans))
            for span in spans:
                steps[span.reason] += span.num_steps
        assert {reason: count for reason, count in steps.items() if count} == event.steps_waited
        check_queue_time(event, [(s.start, s.end) for s in waits[0]])
        total += steps
    return total


def check_queue_time(event: RequestFinished, spans: list[tuple[float, float]]) -> None:
    end = event.time if event.first_scheduled_time is None else event.first_scheduled_time
    waited = sum((Fraction(e) - Fraction(s) for s, e in spans), Fraction())
    assert waited == Fraction(end) - Fraction(event.arrival_time)
