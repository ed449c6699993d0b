"""Property test of the scheduling of requests that generate no tokens, without KV memory."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.clock import VirtualClock
from chairlift.config import SchedulerConfig
from chairlift.core.engine_core import EngineCore
from chairlift.core.kv.no_kv_memory import NoKVMemory
from chairlift.core.measuring.scheduler_meter import SchedulerMeter
from chairlift.core.pooling import PoolingScheduler
from chairlift.events import EventList, RequestFinished, Step
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams

BUDGET, MAX_MODEL_LEN, SEATS = 24, 20, 4


class PoolingExecutor:
    """Returns the tokens of each text as its vector, and checks that each text is computed at once."""

    def submit(self, output: SchedulerOutput) -> ModelRunnerOutput:
        assert 0 < sum(output.num_scheduled_tokens.values()) <= BUDGET
        assert len(output.new_requests) == len(output.num_scheduled_tokens) <= SEATS
        for new in output.new_requests:
            assert output.num_scheduled_tokens[new.request_id] == len(new.token_ids)
        pooled = {new.request_id: bytes(new.token_ids) for new in output.new_requests}
        return ModelRunnerOutput(output.step, {}, pooled=pooled)

    def result(self, handle: ModelRunnerOutput) -> ModelRunnerOutput:
        return handle


def make_request(number: int, length: int) -> Request:
    return Request(f"r{number}", [(number + index) % 256 for index in range(length)], SamplingParams(max_tokens=1), 1)


@settings(max_examples=100, deadline=None)
@given(
    actions=st.lists(
        st.one_of(st.integers(1, MAX_MODEL_LEN), st.just("step"), st.tuples(st.just("abort"), st.integers(0, 30))),
        max_size=40,
    ),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
)
def test_every_text_gets_its_own_vector_once(actions: list[int | str | tuple[str, int]], policy: str) -> None:
    config = SchedulerConfig(MAX_MODEL_LEN, SEATS, BUDGET, policy, is_pooling=True, enable_chunked_prefill=False)
    events = EventList()
    scheduler = PoolingScheduler(config, NoKVMemory(), SchedulerMeter(NoKVMemory(), events))
    core = EngineCore(scheduler, PoolingExecutor(), VirtualClock())
    requests: dict[str, Request] = {}
    aborted: set[str] = set()
    outputs: list[EngineCoreOutput] = []
    for action in actions:
        if isinstance(action, int):
            request = make_request(len(requests), action)
            requests[request.request_id] = request
            core.add(request)
        elif isinstance(action, str):
            outputs += core.step()
        elif core.abort(f"r{action[1]}"):
            aborted.add(f"r{action[1]}")
    while core.has_work:
        outputs += core.step()
    assert {output.request_id for output in outputs} == requests.keys() - aborted
    assert len(outputs) == len(requests) - len(aborted)
    for output in outputs:
        assert output.pooled == bytes(requests[output.request_id].token_ids)
        assert (output.new_token_ids, output.finish_reason) == ([], "stop")
    assert scheduler.is_idle
    finished = [event for event in events.events if isinstance(event, RequestFinished)]
    assert all(event.num_output_tokens == 0 for event in finished)
    assert all(sum(event.num_new) == 0 for event in events.events if isinstance(event, Step))
