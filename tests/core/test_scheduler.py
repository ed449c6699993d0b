from __future__ import annotations

import pytest

from chairlift.config import SchedulerConfig
from chairlift.core.engine_core import EngineCore
from chairlift.core.factory import make_scheduler
from chairlift.core.queues.request_queue import RequestQueue
from chairlift.core.scheduler import Scheduler
from chairlift.errors import ConfigError, RequestError
from chairlift.events import EventList, RequestFinished, RequestRejected, RequestWaiting, Step
from chairlift.outputs import ModelRunnerOutput
from chairlift.request import FinishReason, Request, RequestStatus
from support.fakes import expected_tokens, make_engine, make_request, run_to_end


def steps(events: EventList) -> list[Step]:
    return [event for event in events.events if isinstance(event, Step)]


def waits(events: EventList) -> list[RequestWaiting]:
    return [event for event in events.events if isinstance(event, RequestWaiting)]


def test_the_seat_of_a_finished_request_is_taken_in_the_very_next_step() -> None:
    core, manager, _, events = make_engine(max_num_seqs=2)
    core.add(make_request("a", [1, 2], max_tokens=2))
    core.add(make_request("b", [3, 4], max_tokens=5))
    core.add(make_request("c", [5, 6], max_tokens=2))
    run_to_end(core)
    log = steps(events)
    assert log[1].finished == ["a"]
    assert log[2].admitted == ["c"]
    assert manager.num_free_blocks == manager.num_blocks


def test_a_long_prompt_is_chunked_beside_decodes() -> None:
    core, _, executor, _ = make_engine(max_num_batched_tokens=10)
    core.add(make_request("short", [1, 2], max_tokens=12))
    core.step()
    core.add(make_request("long", list(range(40)), max_tokens=2))
    run_to_end(core)
    chunks = [out.num_scheduled_tokens["long"] for out in executor.outputs if "long" in out.num_scheduled_tokens]
    assert chunks == [9, 9, 9, 9, 4, 1]
    assert all(out.num_scheduled_tokens.get("short", 0) == 1 for out in executor.outputs[1:12])


def test_a_long_request_of_higher_priority_leaves_a_token_to_each_decode() -> None:
    core, _, executor, _ = make_engine(max_num_batched_tokens=8, max_num_seqs=4, scheduling_policy="priority")
    for name in "abc":
        core.add(make_request(name, [ord(name)], max_tokens=9, priority=5))
    core.step()
    core.add(make_request("urgent", list(range(30)), max_tokens=2, priority=0))
    core.step()
    core.step()
    for output in executor.outputs[1:3]:
        assert [output.num_scheduled_tokens[name] for name in "abc"] == [1, 1, 1]
        assert output.num_scheduled_tokens["urgent"] == 5


def test_the_latest_is_preempted_and_recomputed_to_the_same_tokens() -> None:
    core, manager, executor, events = make_engine(num_blocks=6, enable_prefix_caching=False)
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}
    for name, prompt in prompts.items():
        core.add(make_request(name, prompt, max_tokens=12))
    answers = run_to_end(core)
    assert answers == {name: expected_tokens(prompt, 12) for name, prompt in prompts.items()}
    preempted = [name for step in steps(events) for name in step.preempted]
    assert preempted[0] == "c"
    assert "a" not in preempted
    assert "c" in executor.outputs[[bool(step.preempted) for step in steps(events)].index(True)].removed
    assert manager.num_free_blocks == manager.num_blocks


def test_priority_admits_smaller_priorities_first() -> None:
    core, _, _, events = make_engine(max_num_seqs=1, scheduling_policy="priority")
    core.add(make_request("low", [1], max_tokens=2, priority=9))
    core.add(make_request("high", [2], max_tokens=2, priority=1))
    core.add(make_request("high2", [3], max_tokens=2, priority=1))
    run_to_end(core)
    assert [name for step in steps(events) for name in step.admitted] == ["high", "high2", "low"]


def test_every_wait_has_a_reason_with_its_arithmetic() -> None:
    core, _, _, events = make_engine(num_blocks=4, max_num_seqs=2, enable_prefix_caching=False)
    core.add(make_request("a", list(range(9)), max_tokens=4))
    core.add(make_request("b", list(range(9)), max_tokens=4))
    core.step()
    (wait,) = waits(events)
    assert (wait.request_id, wait.reason) == ("b", "memory")
    assert (wait.needed_blocks, wait.free_blocks, wait.evictable_blocks) == (3, 1, 0)
    run_to_end(core)
    assert len(waits(events)) == 1


def test_a_free_seat_is_taken_even_while_a_long_prompt_takes_the_budget() -> None:
    core, _, executor, events = make_engine(max_num_seqs=2, max_num_batched_tokens=6)
    core.add(make_request("long", list(range(20)), max_tokens=3))
    core.add(make_request("b", [1, 2, 3], max_tokens=3))
    core.add(make_request("c", [2], max_tokens=3))
    answers = run_to_end(core)
    assert executor.outputs[0].num_scheduled_tokens == {"long": 5, "b": 1}
    assert [(w.request_id, w.reason) for w in waits(events)] == [("c", "seats")]
    log = steps(events)
    finished = next(step.step for step in log if "b" in step.finished)
    assert log[finished + 1].admitted == ["c"]
    assert answers["long"] == expected_tokens(list(range(20)), 3)


def test_a_request_that_can_never_fit_is_rejected_and_the_others_continue() -> None:
    core, _, _, events = make_engine(num_blocks=4, block_size=4)
    core.add(make_request("a", [1, 2], max_tokens=3))
    with pytest.raises(RequestError, match=r"^the request can never fit: .*whole pool has 4"):
        core.add(make_request("big", list(range(16)), max_tokens=2))
    with pytest.raises(RequestError, match=r"^250 prompt tokens .* exceed max_model_len=256"):
        core.add(make_request("longer", list(range(250)), max_tokens=10))
    with pytest.raises(RequestError, match="in use"):
        core.add(make_request("a", [1]))
    assert run_to_end(core) == {"a": expected_tokens([1, 2], 3)}
    assert [type(e) for e in events.events].count(RequestRejected) == 3


def test_a_stop_token_finishes_the_request_and_is_reported() -> None:
    tokens = expected_tokens([1, 2], 8)
    core, _, _, _ = make_engine()
    core.add(make_request("a", [1, 2], max_tokens=8, stop_token_ids=[tokens[3]]))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert [t for o in outputs for t in o.new_token_ids] == tokens[:4]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_token_id == tokens[3]
    times = outputs[-1].times
    assert times is not None
    assert times.first_token is not None


@pytest.mark.parametrize("when", ["waiting", "running", "parked"])
def test_abort_frees_memory_at_once_in_every_state(when: str) -> None:
    core, manager, _, events = make_engine(max_num_seqs=1, max_num_batched_tokens=4)
    core.add(make_request("a", list(range(12)), max_tokens=4))
    core.add(make_request("sibling", list(range(12)), max_tokens=4, leader_id="a"))
    core.add(make_request("b", [7], max_tokens=4))
    core.step()
    victim = {"waiting": "b", "running": "a", "parked": "sibling"}[when]
    assert core.abort(victim)
    assert not core.abort(victim)
    answers = run_to_end(core)
    assert victim not in answers
    assert len(answers) == 2
    assert manager.num_free_blocks == manager.num_blocks
    reasons = {e.request_id: e.finish_reason for e in events.events if isinstance(e, RequestFinished)}
    assert reasons[victim] == "abort"


def test_allocation_for_a_blocked_head_is_tried_again_only_after_a_block_was_freed_or_cached() -> None:
    core, manager, _, _ = make_engine(num_blocks=12, max_num_seqs=2, enable_prefix_caching=False)
    core.add(make_request("a", list(range(9)), max_tokens=30))
    core.add(make_request("b", list(range(40)), max_tokens=4))
    attempts = 0
    allocate = manager.allocate

    def counting(request: Request) -> int | None:
        nonlocal attempts
        attempts += 1
        return allocate(request)

    manager.allocate = counting  # type: ignore[method-assign]
    for _ in range(20):
        core.step()
    assert attempts == 2
    assert run_to_end(core).keys() == {"a", "b"}
    assert attempts == 3


def test_a_reused_id_never_shares_the_blocks_of_the_earlier_request() -> None:
    core, _, _, _ = make_engine(enable_prefix_caching=False, max_num_seqs=1)
    core.add(make_request("x", list(range(18)), max_tokens=1))
    core.add(make_request("sibling", list(range(18)), max_tokens=3, leader_id="x"))
    answers = {}
    for output in core.step():
        answers[output.request_id] = output.new_token_ids
    core.add(make_request("x", list(range(50, 70)), max_tokens=9))
    assert run_to_end(core)["sibling"] == expected_tokens(list(range(18)), 3)


def test_a_block_that_one_token_filled_is_found_in_the_next_step() -> None:
    """Kernels write what one row computes while other rows of the step read."""
    core, _, executor, _ = make_engine(max_num_batched_tokens=11)
    prompt = list(range(12))
    core.add(make_request("a", prompt, max_tokens=3))
    core.step()
    same_step, next_step = make_request("b", [*prompt, 50, 51]), make_request("c", [*prompt, 60, 61])
    core.add(same_step)
    core.step()
    assert executor.outputs[1].num_scheduled_tokens == {"a": 1, "b": 6}
    core.add(next_step)
    run_to_end(core)
    assert (same_step.meter.num_cached_tokens, next_step.meter.num_cached_tokens) == (8, 12)


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_wait_for_the_leaders_prefill_and_share_its_blocks(caching: bool) -> None:
    core, manager, executor, events = make_engine(max_num_batched_tokens=8, enable_prefix_caching=caching)
    prompt = list(range(18))
    core.add(make_request("x-0", prompt, max_tokens=4))
    for index in (1, 2):
        core.add(make_request(f"x-{index}", prompt, max_tokens=4, leader_id="x-0"))
    sibling = core.scheduler.unfinished.get("x-1")
    assert sibling is not None
    core.step()
    core.step()
    assert sibling.status is RequestStatus.PARKED
    assert [(w.request_id, w.reason) for w in waits(events)] == [(f"x-{i}", "sibling_prefill") for i in (1, 2)]
    answers = run_to_end(core)
    assert sibling.meter.num_cached_tokens == 16
    assert answers["x-1"] == answers["x-0"] == expected_tokens(prompt, 4)
    assert sum(sum(out.num_scheduled_tokens.values()) for out in executor.outputs) == 18 + 2 * 2 + 3 * 3
    assert manager.num_free_blocks == manager.num_blocks


def test_when_the_leader_is_aborted_the_next_sibling_becomes_the_leader() -> None:
    core, _, executor, _ = make_engine(max_num_batched_tokens=8)
    prompt = list(range(18))
    core.add(make_request("x-0", prompt, max_tokens=2))
    core.add(make_request("x-1", prompt, max_tokens=2, leader_id="x-0"))
    core.add(make_request("x-2", prompt, max_tokens=2, leader_id="x-0"))
    core.step()
    core.abort("x-0")
    answers = run_to_end(core)
    assert answers == {name: expected_tokens(prompt, 2) for name in ("x-1", "x-2")}
    first_of_x2 = next(out for out in executor.outputs if "x-2" in out.num_scheduled_tokens)
    assert first_of_x2.new_requests[0].num_computed_tokens == 16


def test_a_step_ahead_gives_the_same_tokens_and_wastes_nothing_on_known_lengths() -> None:
    prompts = {f"r{i}": [i, i + 1] for i in range(5)}
    core, manager, executor, _ = make_engine(steps_ahead=1, max_num_seqs=3)
    for name, prompt in prompts.items():
        core.add(make_request(name, prompt, max_tokens=6))
    assert run_to_end(core) == {name: expected_tokens(prompt, 6) for name, prompt in prompts.items()}
    assert sum(sum(out.num_scheduled_tokens.values()) for out in executor.outputs) == 5 * (2 + 6 - 1)
    assert manager.num_free_blocks == manager.num_blocks


def test_several_tokens_in_one_step_are_taken_and_cut_at_a_stop_token() -> None:
    class Drafting:
        def submit(self, output: object) -> object:
            return output

        def result(self, handle: object) -> ModelRunnerOutput:
            ids = handle.num_scheduled_tokens  # type: ignore[attr-defined]
            return ModelRunnerOutput(handle.step, {rid: [11, 12, 13] for rid in ids})  # type: ignore[attr-defined]

    core, _, _, _ = make_engine()
    drafting = EngineCore(core.scheduler, Drafting(), core._clock)
    core.add(make_request("to-length", [1], max_tokens=7))
    core.add(make_request("to-stop", [2], max_tokens=7, stop_token_ids=[12]))
    answers = run_to_end(drafting)
    assert answers == {"to-length": [11, 12, 13, 11, 12, 13, 11], "to-stop": [11, 12]}


def test_the_budget_must_hold_a_full_batch() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=4 must be at least max_num_seqs=8"):
        SchedulerConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=4)


def test_without_an_event_sink_no_event_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    core, manager, _, _ = make_engine()
    silent = make_scheduler(SchedulerConfig(64, 8, 32), manager)
    events = ("scheduler_meter.RequestArrived", "scheduler_meter.RequestFinished", "wait_log.RequestWaiting")
    for name in (*events, "scheduler_meter.Step"):
        monkeypatch.setattr(f"chairlift.core.measuring.{name}", None)
    quiet = EngineCore(silent, core._executor, core._clock)
    for index in range(12):
        quiet.add(make_request(str(index), [1, 2, 3], max_tokens=3))
    assert len(run_to_end(quiet)) == 12


def test_tokens_do_not_depend_on_an_observer() -> None:
    core, manager, _, _ = make_engine(num_blocks=8, block_size=2)
    unobserved = EngineCore(Scheduler(SchedulerConfig(64, 8, 32), manager), core._executor, core._clock)
    for index in range(12):
        unobserved.add(make_request(str(index), [1, 2, index], max_tokens=9))
    assert run_to_end(unobserved) == {str(index): expected_tokens([1, 2, index], 9) for index in range(12)}
    assert manager.is_empty


def test_requests_are_discarded_from_any_place_of_the_queue() -> None:
    queue = RequestQueue()
    requests = [make_request(str(i), [1]) for i in range(100)]
    for index, request in enumerate(requests):
        request.arrival_index = index
        queue.push(request)
    for request in (requests[0], requests[99], *requests[2:99:2]):
        queue.discard(request)
    assert [queue.pop() for _ in range(len(queue))] == requests[1:99:2]
    assert queue.peek() is None


def test_an_abort_reports_its_reason() -> None:
    core, _, _, events = make_engine()
    core.add(make_request("a", [1]))
    core.step()
    core.abort("a", FinishReason.STOP)
    (finished,) = [e for e in events.events if isinstance(e, RequestFinished)]
    assert finished.finish_reason == "stop"


def test_a_policy_that_the_configuration_does_not_name_is_not_used() -> None:
    _, manager, _, _ = make_engine()
    with pytest.raises(AssertionError, match="the policy that the configuration names"):
        Scheduler(SchedulerConfig(64, 8, 32, batching="static"), manager)
