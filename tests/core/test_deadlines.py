"""Deadlines: an expired request finishes at once with an error, and its memory is freed."""

from __future__ import annotations

from typing import cast

import pytest

from chairlift.clock import VirtualClock
from chairlift.core.engine_core import EngineCore
from chairlift.events import RequestFinished
from support.fakes import make_engine, make_request, run_to_end


def clock_of(core: EngineCore) -> VirtualClock:
    return cast("VirtualClock", core._clock)


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_running_request_finishes_when_its_deadline_passes(batching: str) -> None:
    core, manager, _, events = make_engine(batching=batching)
    core.add(make_request("late", [1, 2, 3], max_tokens=50, deadline=2.0))
    core.add(make_request("stays", [4, 5], max_tokens=6))
    core.step()
    clock_of(core).advance(1.999)
    assert not any(output.finish_reason for output in core.step())
    clock_of(core).advance(0.001)
    (output,) = core.step()
    assert (output.request_id, output.finish_reason, output.error_param) == ("late", "timeout", "timeout")
    assert output.error is not None
    assert "2 s passed after 2 output tokens" in output.error
    answers = run_to_end(core)
    assert set(answers) == {"stays"}
    assert manager.num_free_blocks == manager.num_blocks
    reasons = {e.request_id: e.finish_reason for e in events.events if isinstance(e, RequestFinished)}
    assert reasons == {"late": "timeout", "stays": "length"}


def test_waiting_and_parked_requests_expire_too() -> None:
    core, _, _, _ = make_engine(max_num_seqs=1, max_num_batched_tokens=4)
    core.add(make_request("runs", list(range(20)), max_tokens=5))
    core.step()
    core.add(make_request("waits", [1], deadline=1.0))
    core.add(make_request("parked", list(range(20)), leader_id="runs", deadline=1.0))
    clock_of(core).advance(5.0)
    assert {output.request_id for output in core.step()} == {"waits", "parked"}
    assert set(run_to_end(core)) == {"runs"}


@pytest.mark.parametrize("deadline", [2.995, 3.0001])
def test_a_deadline_that_passes_on_the_way_to_the_engine_is_reported_without_a_time(deadline: float) -> None:
    core, _, _, _ = make_engine()
    clock_of(core).advance(3.1)
    request = make_request("late", [1], deadline=deadline)
    request.arrival_time = 3.0
    core.add(request)
    (output,) = core.step()
    assert output.error == (
        "the timeout passed before the request reached the engine: increase timeout, or reduce max_tokens"
    )


def test_an_engine_whose_last_request_expires_is_idle() -> None:
    for batching in ("continuous", "static"):
        core, _, _, _ = make_engine(batching=batching)
        core.add(make_request("only", [1, 2], max_tokens=9, deadline=1.0))
        core.step()
        clock_of(core).advance(1.0)
        assert [output.finish_reason for output in core.step()] == ["timeout"]
        run_to_end(core)
        assert core.scheduler.is_idle


def test_a_request_that_finished_in_time_does_not_expire() -> None:
    core, _, _, _ = make_engine()
    core.add(make_request("a", [1, 2], max_tokens=2, deadline=3.0))
    assert len(run_to_end(core)["a"]) == 2
    clock_of(core).advance(9.0)
    core.add(make_request("a", [1, 2], max_tokens=2, deadline=20.0))
    assert len(run_to_end(core)["a"]) == 2
