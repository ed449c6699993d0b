"""Shortest remaining processing time: the order, the limited preemption, and the predictors of output lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core import length_predictors
from chairlift.core.length_predictors import HistoryPredictor, LengthPredictor, make_length_predictor
from chairlift.core.queues.shortest_remaining import MAX_DISPLACED_SHARE, ShortestRemainingQueue
from chairlift.errors import ConfigError, RequestError
from chairlift.events import RequestFinished, Step
from chairlift.request import FinishReason, Request
from support.fakes import make_engine, make_request, run_to_end


def predicted(name: str, prompt_len: int, length: int, arrival: int = 0) -> Request:
    request = make_request(name, list(range(prompt_len)), max_tokens=100)
    request.predicted_len, request.arrival_index = length, arrival
    return request


def generated(request: Request, count: int) -> Request:
    """Let a running request have generated tokens."""
    request.num_computed_tokens = request.num_prompt_tokens + count - 1
    request.num_tokens = request.num_prompt_tokens + count
    return request


def test_the_least_work_goes_first_and_then_the_earlier_arrival() -> None:
    queue = ShortestRemainingQueue()
    for arrival, (name, prompt, length) in enumerate([("long", 4, 50), ("prompt", 40, 5), ("a", 4, 5), ("b", 4, 5)]):
        queue.push(predicted(name, prompt, length, arrival))
    assert [queue.pop().request_id for _ in range(4)] == ["a", "b", "prompt", "long"]


def test_work_that_is_done_does_not_count() -> None:
    queue = ShortestRemainingQueue()
    queue.push(generated(predicted("started", 40, 20), 12))
    queue.push(predicted("new", 4, 10, 1))
    assert [queue.pop().request_id for _ in range(2)] == ["started", "new"]


def test_a_request_with_less_work_displaces_until_80_percent_are_generated() -> None:
    queue, head = ShortestRemainingQueue(), predicted("head", 4, 1, 1)
    assert queue.displaces(head, generated(predicted("running", 4, 100), 79))
    assert not queue.displaces(head, generated(predicted("running", 4, 100), 80))
    assert not queue.displaces(predicted("same", 4, 100, 1), predicted("running", 4, 100))


def test_a_request_whose_pending_token_was_dropped_can_be_removed() -> None:
    queue = ShortestRemainingQueue()
    requests = [generated(predicted(f"r{index}", 4, 20, index), 5 + index) for index in range(3)]
    for request in requests:
        queue.push(request)
    requests[1].drop_pending()
    queue.discard(requests[1])
    assert [queue.pop().request_id for _ in range(2)] == ["r2", "r0"]


def test_a_displaced_request_continues_with_its_tokens() -> None:
    core, _, _, events = make_engine(max_num_seqs=1, scheduling_policy="srpt", length_predictor="max_tokens")
    core.add(make_request("long", [1, 2, 3, 4, 5], max_tokens=20))
    for _ in range(6):
        core.step()
    core.add(make_request("short", [6], max_tokens=2))
    core.scheduler._observer.preempted.append("earlier")  # by an attempt that scheduled nothing
    answers = run_to_end(core)
    ended = [event for event in events.events if isinstance(event, RequestFinished)]
    assert [(event.request_id, event.num_preemptions) for event in ended] == [("short", 0), ("long", 1)]
    assert ended[1].num_output_tokens == 20
    assert len(answers["long"]) == 14  # those after the first six steps
    assert [step.displaced for step in events.events if isinstance(step, Step) and step.preempted] == [
        {"long": "short"}
    ]
    assert ended[1].num_recomputed_tokens < 4, "only a block that was not full is computed again"


def test_reservations_are_not_displaced() -> None:
    core, _, _, events = make_engine(
        max_num_seqs=1, scheduling_policy="srpt", length_predictor="max_tokens", kv="exact"
    )
    core.add(make_request("long", [1, 2, 3], max_tokens=20))
    core.step()
    core.add(make_request("short", [6], max_tokens=2))
    run_to_end(core)
    assert all(event.num_preemptions == 0 for event in events.events if isinstance(event, RequestFinished))


LOADS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 12), st.integers(1, 30)), min_size=2, max_size=25
)  # steps before the arrival, prompt tokens, output tokens


@given(load=LOADS, seats=st.integers(1, 3), steps_ahead=st.integers(0, 1))
@settings(max_examples=40, deadline=None)
def test_only_unsettled_requests_are_displaced_by_those_with_less_work(
    load: list[tuple[int, int, int]], seats: int, steps_ahead: int
) -> None:
    core, _, _, events = make_engine(
        num_blocks=400, max_num_seqs=seats, scheduling_policy="srpt", length_predictor="oracle", steps_ahead=steps_ahead
    )
    lengths = {}
    for index, (gap, prompt, output) in enumerate(load):
        for _ in range(gap):
            core.step()
        lengths[f"r{index}"] = output
        core.add(make_request(f"r{index}", [index] * prompt, output, output_len=output))
    run_to_end(core)
    sampled = dict.fromkeys(lengths, 0)
    for step in (event for event in events.events if isinstance(event, Step)):
        assert list(step.displaced) == step.preempted, "memory is never short"
        assert len(step.displaced) <= 1
        for victim, head in step.displaced.items():
            left = lengths[victim] - sampled[victim]
            assert sampled[victim] < MAX_DISPLACED_SHARE * lengths[victim]
            assert head in step.admitted
            assert lengths[head] - sampled[head] < left or sampled[victim] == 0
        for name, count in zip(step.request_ids, step.num_new, strict=True):
            sampled[name] += count
    assert sampled == lengths, "every request of a finite load is served"


def finish(
    predictor: LengthPredictor,
    length: int,
    prompt: list[int],
    tenant: str = "",
    reason: FinishReason = FinishReason.STOP,
) -> None:
    request = make_request("done", prompt, 1000, tenant=tenant)
    request.token_ids += [7] * length
    request.finish_reason = reason
    predictor.record(request)


def arriving(prompt: list[int], tenant: str = "", max_tokens: int = 1000, output_len: int | None = None) -> Request:
    return make_request("new", prompt, max_tokens, tenant=tenant, output_len=output_len)


def test_none_max_tokens_and_oracle() -> None:
    request = arriving([1, 2], max_tokens=50, output_len=9)
    predictions = [make_length_predictor(name).predict(request) for name in ("none", "max_tokens", "oracle")]
    assert predictions == [None, 50, 9]


def test_the_oracle_rejects_a_request_whose_length_is_not_known() -> None:
    core, _, _, _ = make_engine(length_predictor="oracle")
    with pytest.raises(RequestError, match="length_predictor=oracle needs the output length"):
        core.add(make_request("a", [1, 2]))
    assert not core.scheduler.unfinished


def test_history_is_the_quantile_of_the_same_tenant_and_prefix() -> None:
    predictor = make_length_predictor("history:0.9")
    for length in range(1, 11):
        finish(predictor, length, [1, 2, 3], "a")
        finish(predictor, 10 * length, [9, 2, 3], "a")
        finish(predictor, 500, [1, 2, 3], "b")
    assert predictor.predict(arriving([1, 2, 3], "a")) == 9
    assert predictor.predict(arriving([9, 2, 3], "a")) == 90
    assert predictor.predict(arriving([4], "a")) == 80, "all outputs of the tenant"
    assert predictor.predict(arriving([4], "c")) == 500, "all outputs"
    assert predictor.predict(arriving([4], "c", max_tokens=30)) == 30


def test_history_without_a_quantile_is_the_median() -> None:
    predictor = make_length_predictor("history")
    for length in (1, 2, 3, 40, 50):
        finish(predictor, length, [1])
    assert predictor.predict(arriving([1])) == 3


def test_few_or_aborted_outputs_are_no_history() -> None:
    predictor = make_length_predictor("history")
    for _ in range(4):
        finish(predictor, 3, [1])
    for _ in range(9):
        finish(predictor, 3, [1], reason=FinishReason.ABORT)
    assert predictor.predict(arriving([1], max_tokens=77)) == 77


def test_histories_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_predictors, "MAX_HISTORIES", 10)
    predictor = HistoryPredictor(0.5)
    for index in range(300):
        finish(predictor, 1 + index, [index])
    assert len(predictor._histories) == 10
    assert max(map(len, predictor._histories.values())) == length_predictors.MAX_LENGTHS
    assert predictor.predict(arriving([1])) == 268, "the median of the latest 64 of the tenant"


@pytest.mark.parametrize("name", ["median", "history:0", "history:1", "history:x", "oracle:0.5", "history:"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match="length_predictor must be one of none, max_tokens, history, oracle, or history:Q"
    ):
        EngineConfig(length_predictor=name)


def test_srpt_needs_a_predictor_and_has_one_by_default() -> None:
    assert EngineConfig(scheduling_policy="srpt").scheduler_config(64).length_predictor == "history"
    assert EngineConfig().scheduler_config(64).length_predictor == "none"
    with pytest.raises(ConfigError, match="scheduling_policy=srpt orders requests by predicted output lengths"):
        SchedulerConfig(64, scheduling_policy="srpt")
