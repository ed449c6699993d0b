"""Static batches: their members, the columns that they compute, and when and how their outputs are returned."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from chairlift.config import KV_POLICIES, EngineConfig, SchedulerConfig
from chairlift.core.engine_core import EngineCore
from chairlift.errors import ConfigError, RequestError
from chairlift.events import EventList, RequestFinished, RequestWaiting, Step
from chairlift.outputs import EngineCoreOutput, Logprob, TokenLogprobs, join_outputs
from chairlift.request import FinishReason
from support.fakes import CheckingExecutor, expected_tokens, make_engine, make_request, run_to_end


def static(**options: Any) -> tuple[EngineCore, CheckingExecutor, EventList]:
    core, _, executor, events = make_engine(batching="static", **options)
    return core, executor, events


def steps(events: EventList) -> list[Step]:
    return [event for event in events.events if isinstance(event, Step)]


def test_outputs_are_returned_when_the_longest_member_has_finished() -> None:
    core, _, events = static(static_batch_size=2)
    core.add(make_request("short", [1, 2], 2))
    core.add(make_request("long", [3, 4], 5))
    outputs = []
    while core.has_work:
        outputs.append(core.step())
    assert [len(step) for step in outputs] == [0, 0, 0, 0, 2]
    assert not core.scheduler._batch.buffered, "returned outputs are not kept"
    short, long = outputs[-1]
    assert (short.new_token_ids, short.finish_reason) == (expected_tokens([1, 2], 2), "length")
    assert (long.new_token_ids, long.finish_reason) == (expected_tokens([3, 4], 5), "length")
    assert short.stats is not None
    assert short.stats.num_padding_tokens == 3, "one for each step after it has finished"
    assert [step.num_scheduled for step in steps(events)] == [[2, 2], [1, 1], [0, 1], [0, 1], [0, 1]]
    assert [step.finished for step in steps(events)] == [[], [], [], [], ["short", "long"]]


def test_prompts_are_padded_on_the_left_and_computed_column_by_column() -> None:
    core, executor, _ = static(static_batch_size=2, max_num_seqs=2, max_num_batched_tokens=6)
    core.add(make_request("short", [1, 2], 2))
    core.add(make_request("long", list(range(10, 17)), 2))
    run_to_end(core)
    computed = [(out.num_padding_tokens, out.num_scheduled_tokens) for out in executor.outputs]
    assert computed == [
        ({"short": 3}, {"short": 0, "long": 3}),
        ({"short": 2}, {"short": 1, "long": 3}),
        ({}, {"short": 1, "long": 1}),
        ({}, {"short": 1, "long": 1}),
    ]


def test_a_finished_member_keeps_its_slots_and_a_new_request_waits_for_the_batch() -> None:
    core, _, events = static(static_batch_size=2, num_blocks=8, block_size=2)
    core.add(make_request("a", [1, 2], 1))
    core.add(make_request("b", [3, 4], 4))
    core.step()
    core.add(make_request("late", [5, 6], 1))
    for _ in range(3):
        core.step()
    reasons = [(event.request_id, event.reason) for event in events.events if isinstance(event, RequestWaiting)]
    assert reasons == [("late", "batch")]
    last = steps(events)[3]
    assert (last.token_states, last.reserved, last.internal, last.external, last.free) == (5, 0, 3, 0, 8)
    assert run_to_end(core) == {"late": expected_tokens([5, 6], 1)}
    finished = [event for event in events.events if isinstance(event, RequestFinished)]
    assert [(event.request_id, event.steps_waited) for event in finished] == [
        ("a", {}),
        ("b", {}),
        ("late", {"batch": 3}),
    ]


@pytest.mark.parametrize(
    ("size", "blocks", "reason"), [(2, 64, "seats"), (8, 5, "memory")], ids=["batch size", "memory"]
)
def test_members_are_limited_by_batch_size_and_by_worst_case_memory(size: int, blocks: int, reason: str) -> None:
    core, _, events = static(static_batch_size=size, num_blocks=blocks, block_size=4)
    for name in ("a", "b", "c"):
        core.add(make_request(name, [1, 2, 3], 6, stop_token_ids=expected_tokens([1, 2, 3], 6)[1:2]))
    core.step()
    assert core.scheduler.num_running == 2
    waiting = [event for event in events.events if isinstance(event, RequestWaiting)]
    assert [(event.request_id, event.reason) for event in waiting] == [("c", reason)]
    lost = {step.external for step in steps(events)}
    assert (lost != {0}) == (reason == "memory"), "free slots are lost while the queue waits for memory"
    assert len(run_to_end(core)) == 3


def test_a_wait_for_memory_is_reported_with_worst_cases() -> None:
    core, _, events = static(static_batch_size=8, num_blocks=5, block_size=4)
    for name in ("a", "b", "c"):
        core.add(make_request(name, [1, 2, 3], 6))
    core.step()
    (waiting,) = (event for event in events.events if isinstance(event, RequestWaiting))
    assert (waiting.needed_blocks, waiting.free_blocks, waiting.largest_free_piece) == (2, 1, 1)


def test_global_decodes_every_batch_to_the_longest_output_of_all() -> None:
    core, executor, events = static(static_batch_size=2, static_run_to="global")
    lengths = [2, 3, 1, 1, 7]
    for index, length in enumerate(lengths):
        core.add(make_request(str(index), [index], 9, output_len=length))
    answers = run_to_end(core)
    assert {name: len(tokens) for name, tokens in answers.items()} == {str(i): n for i, n in enumerate(lengths)}
    assert len(executor.outputs) == 3 * 7, "iterations = batches times the longest output"
    padding = sum(sum(out.num_padding_tokens.values()) for out in executor.outputs)
    assert padding == 5 * 7 - sum(lengths)
    assert sum(sum(step.num_padding) for step in steps(events)) == padding


def test_global_resets_the_longest_output_when_the_engine_is_empty() -> None:
    core, executor, _ = static(static_run_to="global")
    for name, length in (("long", 9), ("short", 2)):
        core.add(make_request(name, [1], 9, output_len=length))
        run_to_end(core)
    assert len(executor.outputs) == 9 + 2


def test_global_needs_forced_lengths() -> None:
    core, _, _ = static(static_run_to="global")
    with pytest.raises(RequestError, match=r"if it is forced: set ignore_eos.*--static-run-to batch"):
        core.add(make_request("free", [1], 4))


def test_an_aborted_member_keeps_its_row_and_a_batch_of_aborted_members_completes() -> None:
    core, _, events = static(static_batch_size=3)
    for name in ("a", "b", "c"):
        core.add(make_request(name, [1, 2], 4))
    core.add(make_request("next", [9], 1))
    core.step()
    assert core.abort("a")
    assert not core.abort("a")
    core.step()
    assert steps(events)[-1].request_ids == ["a", "b", "c"]
    assert steps(events)[-1].num_scheduled == [0, 1, 1]
    for name in ("b", "c"):
        core.abort(name)
    assert list(core.scheduler.unfinished) == ["next"]
    assert run_to_end(core) == {"next": expected_tokens([9], 1)}


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_global_computes_no_further_columns_for_a_batch_of_aborted_members(steps_ahead: int) -> None:
    core, executor, _ = static(static_batch_size=1, static_run_to="global", steps_ahead=steps_ahead)
    core.add(make_request("gone", [1], 9, output_len=9))
    core.add(make_request("next", [2], 9, output_len=9))
    core.step()
    core.abort("gone")
    assert run_to_end(core) == {"next": expected_tokens([2], 9)}
    assert len(executor.outputs) == 1 + steps_ahead + 9


def test_a_batch_that_an_abort_completed_is_returned_once() -> None:
    core, _, events = static(static_batch_size=2)
    core.add(make_request("done", [1], 1))
    core.add(make_request("gone", [2], 9))
    core.add(make_request("waiting", [3], 9))
    core.step()
    assert core.abort("gone")
    assert core.abort("waiting")
    assert [output.request_id for output in core.step()] == ["done"]
    assert not core.has_work
    assert [e.request_id for e in events.events if isinstance(e, RequestFinished)] == ["done", "gone", "waiting"]


def test_an_aborted_member_is_reported_when_its_batch_is_complete() -> None:
    core, _, events = static(static_batch_size=2)
    core.add(make_request("a", [1], 2))
    core.add(make_request("b", [2], 4))
    core.step()
    core.abort("a", FinishReason.ABORT)
    run_to_end(core)
    a, b = (event for event in events.events if isinstance(event, RequestFinished))
    assert (a.finish_reason, a.first_token_time) == ("abort", None), "its token was never returned"
    assert (b.finish_reason, b.first_token_time) == ("length", b.time)


@pytest.mark.parametrize("kv", KV_POLICIES)
def test_both_batching_policies_give_the_same_tokens_under_every_kv_policy(kv: str) -> None:
    answers = []
    for batching in ("continuous", "static"):
        core, _, _, _ = make_engine(kv=kv, batching=batching, max_model_len=64, num_blocks=48, steps_ahead=1)
        for index in range(12):
            core.add(make_request(str(index), list(range(index % 5 + 1)), 12, output_len=1 + index * 7 % 11))
        answers.append(run_to_end(core))
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batching": "dynamic", "static_batch_size": 4}, "batching must be one of continuous, static"),
        ({"batching": "static", "static_run_to": "end"}, "static_run_to must be one of batch, global"),
        ({"static_batch_size": 4}, "static_batch_size=4 needs batching=static"),
        ({"static_run_to": "batch"}, "static_run_to=batch needs batching=static"),
        ({"batching": "static", "static_batch_size": 0}, "static_batch_size must be at least 1"),
        ({"batching": "static", "static_batch_size": 65}, "static_batch_size=65 must be at most max_num_seqs=64"),
    ],
)
def test_options_that_cannot_be_honoured_raise_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_the_default_batch_size_is_at_most_max_num_seqs() -> None:
    assert EngineConfig(batching="static", max_num_seqs=3).scheduler_config(100).static_batch_size == 3


def test_the_scheduler_config_of_an_engine_config() -> None:
    config = EngineConfig(batching="static", static_run_to="global").scheduler_config(100)
    assert asdict(config) == asdict(SchedulerConfig(100, batching="static", static_run_to="global"))


def logprobs(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(Logprob(token_id, -1.0, 1), []) for token_id in token_ids]


def test_parts_are_joined_in_order() -> None:
    parts = [EngineCoreOutput("a", [1], num_cached_tokens=4), EngineCoreOutput("a", [2, 3])]
    assert join_outputs("a", parts) == EngineCoreOutput("a", [1, 2, 3], num_cached_tokens=4)
    assert join_outputs("a", ()) == EngineCoreOutput("a", [])


def test_a_chunk_without_a_token_loses_no_logprobs_of_later_tokens() -> None:
    parts = [
        EngineCoreOutput("a", [], prompt_logprobs=(1, logprobs(11, 12))),
        EngineCoreOutput("a", [5], logprobs=logprobs(5), prompt_logprobs=(3, logprobs(13))),
        EngineCoreOutput("a", [6], logprobs=logprobs(6)),
    ]
    assert join_outputs("a", parts) == EngineCoreOutput(
        "a", [5, 6], logprobs=logprobs(5, 6), prompt_logprobs=(1, logprobs(11, 12, 13))
    )
