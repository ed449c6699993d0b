"""Beams are those of a search without an engine, whatever else runs, is preempted, swapped or aborted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config import SCHEDULING_POLICIES
from chairlift.core.kv.kv_groups import FULL
from chairlift.errors import RequestError
from chairlift.events import RequestFinished, Step
from chairlift.observability.replay import Replay
from chairlift.outputs import EngineCoreOutput, Logprob, ModelRunnerOutput, TokenLogprobs
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams
from chairlift.slo import SLO
from support.fakes import expected_tokens, likely_tokens, make_engine, make_request
from support.kv_invariants import check_manager
from support.tracked_engine import started

VOCAB_SIZE = 16


def beams(
    name: str, prompt: list[int], width: int, max_tokens: int, stop: tuple[int, ...] = (), **fields: Any
) -> list[Request]:
    """The requests of one beam search."""
    params = SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens, **fields)
    leader = f"{name}-0"
    return [
        Request(
            f"{name}-{index}",
            list(prompt),
            params,
            max_tokens,
            leader_id=leader if index else None,
            stop_token_ids=frozenset(stop),
        )
        for index in range(width)
    ]


def search(prompt: list[int], width: int, max_tokens: int, stop: tuple[int, ...], **fields: Any) -> list[list[int]]:
    """The answers of the fake model, by the definition of beam search, without an engine."""
    penalty, early = fields.get("length_penalty", 1.0), fields.get("early_stopping", False)
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        ranked = [
            (score + entry.logprob, [*tokens, entry.token_id])
            for score, tokens in running
            for entry in likely_tokens([*prompt, *tokens], VOCAB_SIZE)
        ]
        ranked.sort(key=lambda each: -each[0])
        ends = [tokens[-1] in stop or length == max_tokens for _score, tokens in ranked]
        done += [
            (score / length**penalty, tokens)
            for (score, tokens), end in list(zip(ranked, ends, strict=True))[:width]
            if end
        ]
        done = sorted(done, key=lambda each: -each[0])[:width]
        running = [each for each, end in zip(ranked, ends, strict=True) if not end][:width]
        horizon = max_tokens if early == "never" and penalty > 0 else length
        if not running or (len(done) == width and (early is True or running[0][0] / horizon**penalty <= done[-1][0])):
            break
    return [tokens for _score, tokens in done]


def run(core: Any, manager: Any) -> dict[str, EngineCoreOutput]:
    answers: dict[str, EngineCoreOutput] = {}
    for _ in range(3000):
        if not core.has_work:
            assert core.scheduler.is_idle
            return answers
        for output in core.step():
            before = answers.get(output.request_id)
            tokens = [*(before.new_token_ids if before else ()), *output.new_token_ids]
            answers[output.request_id] = output._replace(new_token_ids=tokens)
        check_manager(manager)
    raise AssertionError("unfinished requests always progress")


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "length_penalty": st.sampled_from([0.0, 0.5, 2.0, -1.0]),
        "early_stopping": st.sampled_from([True, False, "never"]),
        "slo": st.sampled_from([SLO(ttft_ms=1.0), SLO(ttft_ms=9e6)]),
    },
)
SEARCHES = st.tuples(
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 7),
    st.sampled_from([(), (3,), (3, 5)]),
    FIELDS,
)


@given(
    searches=st.lists(SEARCHES, min_size=1, max_size=3),
    others=st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(1, 8)), max_size=3),
    num_blocks=st.integers(8, 60),
    block_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(4, 9),
    extra_budget=st.integers(0, 8),
    caching=st.booleans(),
    num_swap_blocks=st.sampled_from([0, 5, 100]),
    steps_ahead=st.integers(0, 1),
    policy=st.sampled_from(SCHEDULING_POLICIES),
    aborted=st.one_of(st.none(), st.integers(1, 6)),
    windows=st.sampled_from([FULL, FULL, (None, 3), (4, 4), (2, None, 5)]),
)
@settings(max_examples=300, deadline=None)
def test_beams_do_not_depend_on_the_engine(
    searches: list[tuple[list[int], int, int, tuple[int, ...], dict[str, Any]]],
    others: list[tuple[list[int], int]],
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    extra_budget: int,
    caching: bool,
    num_swap_blocks: int,
    steps_ahead: int,
    policy: str,
    aborted: int | None,
    windows: tuple[int | None, ...],
) -> None:
    num_swap_blocks = num_swap_blocks if windows == FULL else 0
    core, manager, _, events = make_engine(
        num_blocks=num_blocks * len(windows),
        windows=windows,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_budget,
        enable_prefix_caching=caching,
        num_swap_blocks=num_swap_blocks,
        steps_ahead=steps_ahead,
        scheduling_policy=policy,
    )
    expected: dict[str, list[int]] = {}
    for number, (prompt, width, max_tokens, stop, fields) in enumerate(searches):
        if width * -(-(len(prompt) + max_tokens - 1) // block_size) > num_blocks:
            continue
        for request in beams(f"b{number}", prompt, width, max_tokens, stop, **fields):
            core.add(request)
        answers = search(prompt, width, max_tokens, stop, **fields)
        expected |= {f"b{number}-{index}": tokens for index, tokens in enumerate(answers)}
    for number, (prompt, max_tokens) in enumerate(others):
        if -(-(len(prompt) + max_tokens - 1) // block_size) <= num_blocks:
            core.add(make_request(f"o{number}", prompt, max_tokens))
            expected[f"o{number}"] = expected_tokens(prompt, max_tokens)
    gone: set[str] = set()
    if aborted is not None and expected:
        for _ in range(aborted):
            for output in core.step() if core.has_work else ():
                if output.finish_reason is not None:
                    gone.add(output.request_id)
        name = next(iter(expected))
        if core.abort(name):
            gone |= {each for each in expected if each.split("-")[0] == name.split("-")[0]}
    found = run(core, manager)
    if aborted is None:
        assert {name: output.new_token_ids for name, output in found.items()} == expected
    else:
        finished = {name: output.new_token_ids for name, output in found.items() if name.startswith("b")}
        assert finished == {name: expected[name] for name in finished}
        assert gone | found.keys() == expected.keys()
    ended = [event.request_id for event in events.events if isinstance(event, RequestFinished)]
    assert sorted(ended) == sorted(expected)
    num_slots = manager.num_blocks * block_size
    steps = [event for event in events.events if isinstance(event, Step)]
    assert all(e.token_states + e.reserved + e.internal + e.external + e.free == num_slots for e in steps)
    assert all(min(e.token_states, e.reserved, e.internal, e.free, e.saved) >= 0 for e in steps)


def test_beams_share_full_blocks_and_copy_the_last_one() -> None:
    core, manager, executor, events = make_engine(num_blocks=40, block_size=4, enable_prefix_caching=False)
    for request in beams("b", [1] * 18, 4, 12):
        core.add(request)
    run(core, manager)
    steps = [event for event in events.events if isinstance(event, Step)]
    assert steps[0].num_scheduled == [18], "the leader computes the prompt"
    assert steps[1].num_scheduled == [1, 1, 1, 1]
    assert steps[1].saved == 3 * 16
    assert steps[1].admitted == ["b-1", "b-2", "b-3"]
    assert len(executor.outputs[1].copied_blocks) == 3
    assert any(step.saved > 3 * 16 for step in steps), "beams share blocks of their outputs"
    assert sum(sum(step.num_scheduled) for step in steps) == 18 + 4 * 11


def test_a_search_that_cannot_run_alone_is_rejected() -> None:
    core, _, _, _ = make_engine(num_blocks=8, block_size=4, max_num_seqs=4)
    with pytest.raises(RequestError, match=r"^n=5 beams need as many seats, and max_num_seqs=4"):
        core.add(beams("a", [1], 5, 4)[0])
    with pytest.raises(
        RequestError, match=r"^the request can never fit: n=3 beams of up to 13 tokens need 9 blocks of 4 .* pool has 8"
    ):
        core.add(beams("b", [1] * 3, 3, 10)[0])
    assert not core.scheduler.has_unfinished


def test_answers_have_the_logprobs_of_their_tokens() -> None:
    core, manager, _, _ = make_engine()
    for request in beams("b", [1, 2], 3, 5, logprobs=2):
        core.add(request)
    for output in run(core, manager).values():
        assert output.logprobs is not None
        assert [entry.token.token_id for entry in output.logprobs] == output.new_token_ids
        for index, entry in enumerate(output.logprobs):
            assert entry.top == likely_tokens([1, 2, *output.new_token_ids[:index]])[:2]


def test_a_search_that_fails_returns_the_error_for_every_beam() -> None:
    core, _, _, events = make_engine()
    for request in beams("b", [1, 2], 3, 5):
        core.add(request)
    scheduler = core.scheduler
    for _ in range(2):
        core.step()
    output = scheduler.schedule(0.0)
    assert output is not None
    names = [f"b-{index}" for index in range(3)]
    logprobs = {name: [TokenLogprobs(Logprob(1, -1.0, 1), [])] for name in names}
    result = ModelRunnerOutput(output.step, {name: [1] for name in names}, logprobs, errors={"b-2": "no logits"})
    outputs = scheduler.update(result, 0.0)
    assert {each.request_id: each.error for each in outputs} == dict.fromkeys(names, "no logits")
    assert len(outputs) == 3
    assert all(each.finish_reason == "error" and not each.new_token_ids for each in outputs)
    last = next(event for event in reversed(events.events) if isinstance(event, Step))
    assert sorted(last.finished) == names


def test_every_beam_of_an_expired_search_has_an_output() -> None:
    core, _, _, _ = make_engine()
    for request in beams("b", [1, 2], 3, 50):
        request.deadline = 0.5
        core.add(request)
    for _ in range(3):
        core.step()
    core._clock.advance(1.0)  # type: ignore[attr-defined]
    outputs = core.step()
    assert {each.request_id: each.finish_reason for each in outputs} == {f"b-{i}": "timeout" for i in range(3)}
    assert core.scheduler.is_idle


def test_events_have_the_blocks_that_beams_hold() -> None:
    core, manager, executor, events = make_engine(num_blocks=40, block_size=4, enable_prefix_caching=False)
    replay, num_seen, num_moved = Replay(), 0, 0
    replay.emit(started(manager))
    for request in beams("b", [1] * 6, 4, 14):
        core.add(request)
    while core.has_work:
        core.step()
        for event in events.events[num_seen:]:
            replay.emit(event)
            num_moved += isinstance(event, Step) and bool(event.released_blocks)
        num_seen = len(events.events)
        for name, tracked in replay.batch.items():
            assert tracked.block_ids == executor.tables[name][0]
    assert num_moved > 1
