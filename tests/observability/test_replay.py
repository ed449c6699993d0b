"""Checks the state that is replayed from events: which requests have ended, left the batch, or were lost."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from chairlift.events import EngineStarted, RequestArrived, RequestFinished, RequestRejected, Step
from chairlift.observability.prometheus import PrometheusMetrics
from chairlift.observability.replay import Replay, ReplayReader
from chairlift.observability.tracked_request import TrackedRequest
from chairlift.observability.tracker import FAIRNESS, RequestTracker


def started(time: float = 0.0, **options: Any) -> EngineStarted:
    policy = options.pop("scheduling_policy", "fcfs")
    return EngineStarted(time, "fake", 4, 64, 8, 64, 64, policy, "paged", False, **options)


def step(number: int, request_ids: list[str], admitted: list[str] | None = None, **fields: Any) -> Step:
    """A step from second `number` to the next, which computes one token of each request."""
    ones, zeros = [1] * len(request_ids), [0] * len(request_ids)
    counts = {"num_running": len(request_ids), "num_waiting": 0, "free_blocks": 0, "evictable_blocks": 0}
    return Step(
        number + 1.0, number, float(number), request_ids, ones, zeros, ones, admitted or [], [], [], **counts, **fields
    )


def finished(request_id: str, end_step: int) -> RequestFinished:
    return RequestFinished(float(end_step), request_id, "abort", 1, 0, 0, 0, 0.0, None, None, step=end_step)


class EndReader(ReplayReader):
    """Lists the ids of requests that have ended and that have left."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.left: list[str] = []

    def on_end(self, request: TrackedRequest) -> None:
        self.ended.append(request.request_id)

    def on_leave(self, request: TrackedRequest) -> None:
        self.left.append(request.request_id)


def instructions_of_aborts(num_requests: int) -> int:
    """The number of Python instructions that replay the abort of all requests while the step that admits them is in
    flight."""
    reader = EndReader()
    replay = Replay(reader)
    names = [f"r{index}" for index in range(num_requests)]
    events = [started(), *(RequestArrived(0.0, name, 4, 4) for name in names), *(step(n, []) for n in range(3))]
    for event in [*events, *(finished(name, 4) for name in names[: num_requests // 2])]:
        replay.emit(event)
    num_instructions = 0

    def count(frame: FrameType, kind: str, _: Any) -> Any:
        nonlocal num_instructions
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num_instructions += kind == "opcode"
        return count

    previous = sys.gettrace()
    sys.settrace(count)
    try:
        for name in names[num_requests // 2 :]:
            replay.emit(finished(name, 4))
        replay.emit(step(3, names, names))
    finally:
        sys.settrace(previous)
    assert reader.ended == reader.left == names
    assert not replay.batch
    return num_instructions


def test_the_work_of_many_aborts_during_a_step_is_linear() -> None:
    assert 1.9 < instructions_of_aborts(2000) / instructions_of_aborts(1000) < 2.1


def test_two_ended_requests_with_one_id_leave_after_the_step_in_flight() -> None:
    reader = EndReader()
    replay = Replay(reader)
    arrived = RequestArrived(0.0, "a", 4, 4)
    for event in (started(), arrived, finished("a", 1), RequestArrived(0.5, "a", 4, 4, step=1), finished("a", 1)):
        replay.emit(event)
    assert [(request.request_id, request.index) for request in replay.remaining] == [("a", 0), ("a", 1)]
    replay.emit(step(0, ["a"], ["a"]))
    assert reader.left == ["a", "a"]
    assert not replay.remaining


def test_members_of_a_static_batch_leave_before_the_next_batch_if_steps_are_dropped() -> None:
    for dropped_admission in (False, True):
        reader = EndReader()
        replay = Replay(reader)
        replay.emit(started(batching="static", static_batch_size=2))
        for name in "abcd":
            replay.emit(RequestArrived(0.0, name, 4, 4))
        replay.emit(step(0, ["a", "b"], ["a", "b"]))
        replay.emit(finished("a", 2))
        assert list(replay.batch) == ["a", "b"]
        replay.emit(finished("b", 2))  # the event of step 1 is dropped
        replay.emit(step(3, ["c", "d"]) if dropped_admission else step(2, ["c", "d"], ["c", "d"]))
        assert list(replay.batch) == ["c", "d"]
        assert reader.left == ["a", "b"]


def test_members_of_a_static_batch_leave_when_the_last_one_has_ended() -> None:
    reader = EndReader()
    replay = Replay(reader)
    replay.emit(started(batching="static", static_batch_size=2))
    for name in "ab":
        replay.emit(RequestArrived(0.0, name, 4, 4))
    replay.emit(step(0, ["a", "b"], ["a", "b"]))
    replay.emit(finished("a", 1))
    assert reader.left == []
    replay.emit(finished("b", 1))
    assert sorted(reader.left) == ["a", "b"]
    assert not replay.batch


def test_a_rejected_request_with_an_id_in_use_is_counted() -> None:
    tracker = RequestTracker()
    metrics = PrometheusMetrics(tracker)
    for event in (started(), RequestArrived(0.0, "a", 4, 4), RequestRejected(0.5, "a", "the id is in use")):
        tracker.emit(event)
    counts = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    assert counts["chairlift:requests_rejected_total"] == 1
    assert [(request.request_id, request.state) for request in tracker.requests()] == [("a", "waiting")]
    tracker.emit(finished("a", 0))
    assert [(request.request_id, request.state) for request in tracker.requests()] == [("a", "finished")]


def test_only_the_requests_of_the_last_engine_continue_after_a_restart() -> None:
    replay = Replay()
    for event in (started(), RequestArrived(0.0, "a", 4, 4), started(1.0), RequestArrived(1.0, "b", 4, 4)):
        replay.emit(event)
    replay.end(2.0)
    replay.emit(started(3.0))
    for name in "ab":
        replay.emit(RequestArrived(3.0, name, 4, 4))
    assert {name: request.waits[0].is_restart for name, request in replay.unfinished.items()} == {"a": False, "b": True}


def test_waits_before_a_restart_are_explained_by_the_earlier_engine() -> None:
    tracker = RequestTracker()
    tracker.emit(started(scheduling_policy="fair"))
    for name, tenant in (("a", "x"), ("head", "x"), ("b", "y")):
        tracker.emit(RequestArrived(0.0, name, 4, 4, tenant=tenant))
    tracker.emit(step(0, ["a"], ["a"], wait_reason="seats", head_id="head"))
    tracker.emit(finished("b", 2))  # step 1 is in flight
    tracker.emit(started(3.0))
    request = tracker.get("b")
    assert request is not None
    (spans,) = tracker.spans(request)
    assert FAIRNESS in [span.reason for span in spans]
    assert "seats" not in [span.reason for span in spans]
