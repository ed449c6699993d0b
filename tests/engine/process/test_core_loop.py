"""The loop of an engine core delivers outputs that do not result from a step."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.commands import Abort, AdapterResult, Add, Command, LoadAdapter, Stop
from chairlift.engine.process.core_loop import CoreLoop, change_adapters
from chairlift.lora import LoRARequest
from chairlift.outputs import EngineCoreOutput, SchedulerOutput
from chairlift.sampling_params import SamplingParams
from support.fakes import expected_tokens, make_engine
from support.waiting import AMPLE_SECONDS


def request(request_id: str, max_tokens: int) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return EngineRequest(request_id, [1, 2], params, max_tokens, frozenset(), seed=0, arrival_time=0.0)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_an_answer_is_delivered_when_the_last_other_request_of_its_batch_is_aborted(steps_ahead: int) -> None:
    core, _, executor, _ = make_engine(batching="static", static_batch_size=2, steps_ahead=steps_ahead)
    submit, may_continue, is_halfway = executor.submit, threading.Event(), threading.Event()

    def stop_halfway(output: SchedulerOutput) -> Any:
        if output.step == 5:
            is_halfway.set()
            assert may_continue.wait(AMPLE_SECONDS)
        return submit(output)

    executor.submit = stop_halfway  # type: ignore[method-assign]
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    delivered: queue.SimpleQueue[EngineCoreOutput] = queue.SimpleQueue()

    def take(wait: bool) -> Command | None:
        try:
            return commands.get(block=wait)
        except queue.Empty:
            return None

    def deliver(outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            delivered.put(output)

    thread = threading.Thread(target=CoreLoop(core, take, deliver).run, daemon=True)
    thread.start()
    for each in (request("done", 2), request("aborted", 100)):
        commands.put(Add(each))
    assert is_halfway.wait(AMPLE_SECONDS)
    assert delivered.empty(), "outputs of a static batch are returned when the whole batch has finished"
    commands.put(Abort(["aborted"]))
    may_continue.set()
    output = delivered.get(timeout=AMPLE_SECONDS)
    commands.put(Stop())
    thread.join()
    assert delivered.empty()
    assert (output.request_id, output.new_token_ids) == ("done", expected_tokens([1, 2], 2))
    assert output.finish_reason == "length"
    assert len(executor.outputs) == 6, "no step was computed for the aborted request"
    assert not core.has_work


def test_an_adapter_whose_reader_fails_is_an_error_of_its_call() -> None:
    class FailingLoader:
        def load(self, _module: LoRARequest) -> None:
            raise OverflowError("a number of the file is too large")

    result = change_adapters(FailingLoader(), LoadAdapter(LoRARequest("one", 1, "folder")))  # type: ignore[arg-type]
    assert result == AdapterResult(1, "adapter 'one' cannot be read (OverflowError); see the log")
