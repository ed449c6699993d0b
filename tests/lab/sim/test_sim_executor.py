"""SimExecutor compared with the recorded events, and with an executor that stores tokens."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sim_workloads import MAX_MODEL_LEN, ConstantCost, ReplayingExecutor, configs, workloads

from chairlift.clock import VirtualClock
from chairlift.config import SchedulerConfig
from chairlift.core.engine_core import EngineCore, Executor
from chairlift.core.factory import KVPool, make_kv_cache_manager, make_scheduler
from chairlift.events import EventList, Step
from chairlift.lab.sim.cost_model import StepShape, num_causal_pairs, num_padding_pairs, recorded_shape
from chairlift.lab.sim.executor import SimExecutor
from chairlift.lab.sim.simulator import SimConfig, forced_request, simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.outputs import ModelRunnerOutput, NewRequest, SchedulerOutput
from chairlift.sampling_params import SamplingParams
from support.fakes import CheckingExecutor


@settings(max_examples=150, deadline=None)
@given(workloads(), configs())
def test_shapes_equal_those_of_the_events(workload: list[WorkloadRequest], config: SimConfig) -> None:
    events, cost = EventList(), ConstantCost()
    simulate(workload, config, cost, events)
    assert cost.shapes == [recorded_shape(event) for event in events.events if isinstance(event, Step)]


class Recorder:
    """Forwards all calls to an executor and records the scheduler outputs."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.outputs: list[str] = []

    def submit(self, output: SchedulerOutput) -> Any:
        self.outputs.append(repr(output))
        return self._executor.submit(output)

    def result(self, handle: Any) -> ModelRunnerOutput:
        return self._executor.result(handle)


def run_by_steps(
    workload: list[WorkloadRequest], config: SchedulerConfig, executor: Executor, num_blocks: int
) -> tuple[list[str], dict[str, list[int]]]:
    """Returns scheduler outputs and output tokens; arrivals are in steps, and step 5 aborts the last request."""
    manager = make_kv_cache_manager(KVPool(num_blocks, 4, MAX_MODEL_LEN), enable_prefix_caching=True)
    recorder = Recorder(executor)
    core = EngineCore(make_scheduler(config, manager), recorder, VirtualClock())
    answers: dict[str, list[int]] = {}
    for number in range(2000):
        for item in workload:
            if number == int(item.arrival):
                core.add(forced_request(item))
        if number == 5:
            core.abort(workload[-1].request_id)
        for output in core.step():
            answers.setdefault(output.request_id, []).extend(output.new_token_ids)
        if number > 100 and not core.has_work:
            return recorder.outputs, answers
    raise AssertionError("the workload does not end")


@settings(max_examples=80, deadline=None)
@given(workloads(), st.integers(1, 6), st.integers(6, 40), st.sampled_from([16, 64]))
def test_replayed_recording_is_scheduled_like_the_original(
    workload: list[WorkloadRequest], seats: int, budget: int, num_blocks: int
) -> None:
    """The scheduler outputs are equal, block ids included, with preemptions, prefix hits and an abort."""
    config = SchedulerConfig(MAX_MODEL_LEN, max_num_seqs=seats, max_num_batched_tokens=budget)
    original, answers = run_by_steps(workload, config, CheckingExecutor(4, num_blocks, budget, seats), num_blocks)
    assert run_by_steps(workload, config, ReplayingExecutor(answers), num_blocks) == (original, answers)


def new_request(request_id: str, tokens: int, computed: int = 0) -> NewRequest:
    return NewRequest(request_id, [7] * tokens, tokens, computed, [], SamplingParams(), 0, [])


def test_shapes_of_known_steps() -> None:
    cost = ConstantCost()
    executor = SimExecutor(cost, VirtualClock())
    executor.submit(SchedulerOutput(0, {"a": 3, "b": 5}, [new_request("a", 3), new_request("b", 9, computed=2)]))
    executor.submit(SchedulerOutput(1, {"a": 1, "b": 2}))
    executor.submit(SchedulerOutput(2, {"b": 1}))
    executor.submit(SchedulerOutput(3, {"a": 1}, removed=["b"]))
    executor.submit(SchedulerOutput(4, {"a": 0}, num_padding_tokens={"a": 1}))
    assert cost.shapes == [
        StepShape(8, 2, 1, 3 + 7, 6 + (3 + 4 + 5 + 6 + 7)),
        StepShape(3, 2, 2, 4 + 9, 4 + (8 + 9)),
        StepShape(1, 1, 1, 10, 10),
        StepShape(1, 1, 1, 5, 5),
        StepShape(1, 1, 1, 5, 5),
    ]


def test_steps_ahead_run_one_after_another() -> None:
    clock = VirtualClock()
    executor = SimExecutor(ConstantCost(2.0), clock)
    first = executor.submit(SchedulerOutput(0, {"a": 1}, [new_request("a", 1)]))
    second = executor.submit(SchedulerOutput(1, {"a": 1}))
    assert clock.now() == 0
    assert executor.result(first).token_ids == {"a": [0]}
    assert clock.now() == 2
    clock.advance(1)
    executor.result(second)
    assert clock.now() == 4
    third = executor.submit(SchedulerOutput(2, {"a": 1}))
    executor.result(third)
    assert clock.now() == 6


@given(st.integers(0, 50), st.integers(0, 50))
def test_pairs_are_counted_per_query(length: int, count: int) -> None:
    assert num_causal_pairs(length, count) == sum(length + query + 1 for query in range(count))
    assert num_padding_pairs(length, count) == sum(max(0, length - query) for query in range(count))
