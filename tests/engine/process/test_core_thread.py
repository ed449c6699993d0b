"""The core's thread delivers what there is to tell, though no step brings it."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.commands import Abort, Add
from chairlift.engine.process.core_thread import EngineCoreThread
from chairlift.outputs import EngineCoreOutput, SchedulerOutput
from chairlift.sampling_params import SamplingParams
from fakes import expected_tokens, make_engine


def request(request_id: str, max_tokens: int) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return EngineRequest(request_id, [1, 2], params, max_tokens, [], seed=0, arrival_time=0.0)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_reader_gets_its_answer_when_the_last_companion_in_its_batch_leaves(steps_ahead: int) -> None:
    core, _, executor, _ = make_engine(batching="static", static_batch_size=2, steps_ahead=steps_ahead)
    submit, may_go_on, is_halfway = executor.submit, threading.Event(), threading.Event()

    def stop_halfway(output: SchedulerOutput) -> Any:
        if output.step == 5:
            is_halfway.set()
            assert may_go_on.wait(10)
        return submit(output)

    executor.submit = stop_halfway  # type: ignore[method-assign]
    told: queue.SimpleQueue[list[EngineCoreOutput]] = queue.SimpleQueue()
    thread = EngineCoreThread(core, told.put, lambda error: None)
    thread.start()
    thread.send(Add([request("done", 2), request("leaves", 100)]))
    assert is_halfway.wait(10)
    assert told.empty(), "nothing is told while the batch runs"
    thread.send(Abort(["leaves"]))
    may_go_on.set()
    (output,) = told.get(timeout=10)
    thread.stop()
    thread.join()
    assert (output.request_id, output.new_token_ids) == ("done", expected_tokens([1, 2], 2))
    assert output.finish_reason == "length"
    assert len(executor.outputs) == 6, "no step was computed for the one that left"
    assert not core.has_work
