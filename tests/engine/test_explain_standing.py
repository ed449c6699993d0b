"""Whoever stands is explained: how long it stood, who has a seat before it, and when it will have one."""

from __future__ import annotations

import pytest

from chairlift.engine.explain import ExplainedStand, Explainer, Explanation, Viewer
from chairlift.engine.forecast import Member, Next, steps_until_admitted, steps_until_seated
from chairlift.engine.wait_text import describe, describe_standing
from chairlift.metrics.step_cost import MIN_STEPS
from chairlift.request import WaitReason
from chairlift.server.api.requests import explanation_view, sequence_view
from tracked_crowds import Crowd


def crowded(num_requests: int, max_tokens: int = 12, **options: object) -> Crowd:
    crowd = Crowd(**{"max_num_seqs": 1, "prefill_ahead": 2, **options})
    for index in range(num_requests):
        crowd.add([index] * 3, max_tokens)
    crowd.steps(MIN_STEPS + 1)
    return crowd


def explain(crowd: Crowd, request_id: str) -> Explanation:
    request = crowd.tracker.get(request_id)
    assert request is not None
    return Explainer(crowd.tracker).explain(request, Viewer(), crowd.clock.now())


def standing(crowd: Crowd, request_id: str) -> ExplainedStand:
    stand = explain(crowd, request_id).standing
    assert stand is not None
    return stand


def test_who_stands_is_told_how_many_are_before_it_and_how_long() -> None:
    crowd = crowded(3)
    seats = [standing(crowd, name) for name in ("r2", "r3")]
    assert [(stand.num_steps, stand.has_token, stand.position) for stand in seats] == [
        (MIN_STEPS, True, 0),
        (MIN_STEPS, True, 1),
    ]
    now = crowd.clock.now()
    crowd.to_end()
    for stand, name in zip(seats, ("r1", "r2"), strict=True):
        before = crowd.tracker.get(name)
        assert before is not None
        assert before.finished is not None
        assert stand.expected_wait == pytest.approx(before.finished.time - now, rel=0.25)


def test_those_ahead_add_nothing_to_what_a_step_takes() -> None:
    """A step of the seat alone takes 0.11 s here, and one of 25 tokens three times as long."""
    crowd = crowded(26, prefill_ahead=24, max_num_batched_tokens=80)
    stand, explained = standing(crowd, "r2"), explain(crowd, "r26")
    now = crowd.clock.now()
    crowd.to_end()
    first, last = crowd.tracker.get("r1"), crowd.tracker.get("r26")
    assert first is not None
    assert first.finished is not None
    assert last is not None
    assert last.first_scheduled is not None
    assert stand.expected_wait == pytest.approx(first.finished.time - now, rel=0.25)
    assert explained.expected_wait == pytest.approx(last.first_scheduled - now, rel=0.25)


def test_a_prompt_that_is_computed_ahead_has_no_seat_and_may_be_before_who_stands() -> None:
    crowd = Crowd(max_num_seqs=1, prefill_ahead=2, scheduling_policy="priority", max_num_batched_tokens=4)
    first = crowd.add([1], 40, priority=-2)
    last = crowd.add([2] * 3, 8)
    crowd.steps(MIN_STEPS)
    urgent = crowd.add([3] * 30, 8, priority=-1)
    crowd.steps(2)
    assert [request.request_id for request in crowd.tracker.ahead()] == [urgent, last]
    assert crowd.tracker.last_step is not None
    assert crowd.tracker.last_step.request_ids == [first, urgent]
    stand, now = standing(crowd, last), crowd.clock.now()
    assert stand.position == 1
    crowd.to_end()
    before = crowd.tracker.get(urgent)
    assert before is not None
    assert before.finished is not None
    assert stand.expected_wait == pytest.approx(before.finished.time - now, rel=0.3)


def test_a_stand_in_words_while_it_lasts_and_after() -> None:
    crowd = crowded(3)
    text = describe_standing(standing(crowd, "r3"))
    assert text.startswith("has its first token and stands until a seat is free: 1 before it, about ")
    assert text.endswith(" so far")
    assert explain(crowd, "r1").standing is None
    crowd.to_end()
    over = standing(crowd, "r3")
    request = crowd.tracker.get("r3")
    assert request is not None
    assert request.finished is not None
    assert over.num_steps == request.finished.steps_stood > 20
    assert describe_standing(over).startswith(f"stood for {over.num_steps} steps, ")


def test_the_seconds_are_those_between_the_first_token_and_the_seat() -> None:
    crowd = crowded(2)
    crowd.to_end()
    first = crowd.tracker.get("r1")
    second = crowd.tracker.get("r2")
    assert first is not None
    assert second is not None
    assert first.finished is not None
    assert second.first_token is not None
    assert standing(crowd, "r2").seconds == pytest.approx(first.finished.time - second.first_token, abs=0.01)


def test_who_waits_behind_them_is_told_so() -> None:
    crowd = crowded(4)
    explained = explain(crowd, "r4")
    (seats,) = (span for span in explained.waits[0].spans if span.reason == WaitReason.SEATS)
    assert describe(seats).startswith("the only seat was taken, and 2 more ran ahead of one; behind ")
    now = crowd.clock.now()
    crowd.to_end()
    request = crowd.tracker.get("r4")
    assert request is not None
    assert request.first_scheduled is not None
    assert explained.expected_wait == pytest.approx(request.first_scheduled - now, rel=0.25)


def test_those_ahead_come_to_a_seat_in_their_order_and_not_by_what_they_hold() -> None:
    """The second of the queue gets the place of r3, which has a seat once r2 has ended: long before r3 has."""
    crowd = Crowd(max_num_seqs=1, prefill_ahead=2)
    for prompt_len, max_tokens in ((3, 12), (3, 4), (24, 60), (3, 4), (3, 4)):
        crowd.add([crowd.count] * prompt_len, max_tokens)
    crowd.steps(MIN_STEPS + 1)
    assert [request.request_id for request in crowd.tracker.ahead()] == ["r2", "r3"]
    assert crowd.tracker.holders()[0].request_id == "r3"
    explained, now = explain(crowd, "r5"), crowd.clock.now()
    crowd.to_end()
    request = crowd.tracker.get("r5")
    assert request is not None
    assert request.first_scheduled is not None
    assert explained.expected_wait == pytest.approx(request.first_scheduled - now, rel=0.25)


def test_who_waits_for_memory_that_the_seat_does_not_spare_waits_for_the_seat() -> None:
    """Each writes 42 slots, which are 21 of 22 blocks, and has a prompt of 2 blocks."""
    crowd = crowded(2, max_tokens=40, num_blocks=22, block_size=2, enable_prefix_caching=False)
    explained = explain(crowd, "r2")
    assert (explained.state, explained.position) == ("waiting", 0)
    assert [span.reason for span in explained.waits[0].spans if span.num_steps] == [WaitReason.SEATS]
    now = crowd.clock.now()
    crowd.to_end()
    request = crowd.tracker.get("r2")
    assert request is not None
    assert request.first_scheduled is not None
    assert explained.expected_wait == pytest.approx(request.first_scheduled - now, rel=0.3)


def test_without_its_first_token_it_is_told_what_its_prompt_waits_for() -> None:
    text = describe_standing(ExplainedStand(0.5, 2, has_token=False, is_standing=True, position=0))
    assert text.startswith("gets what others leave of the token budget until a seat is free: 0 before it; stood for 2 ")


def test_under_fair_turns_nobody_can_say_when() -> None:
    crowd = crowded(2, scheduling_policy="fair", enable_prefix_caching=False)
    (stand,) = (stand for name in ("r1", "r2") if (stand := explain(crowd, name).standing) and stand.is_standing)
    assert (stand.position, stand.expected_wait) == (0, None)
    assert "0 before it; stood for " in describe_standing(stand)


def test_the_api_shows_it() -> None:
    crowd = crowded(2)
    request = crowd.tracker.get("r2")
    assert request is not None
    view = sequence_view(request, crowd.tracker.spans(request), crowd.clock.now())
    assert (view.state, view.steps_stood, view.num_output_tokens) == ("standing", MIN_STEPS, 1)
    shown = explanation_view(explain(crowd, "r2"))
    assert shown.standing is not None
    assert shown.standing.text == describe_standing(standing(crowd, "r2"))
    assert explanation_view(explain(crowd, "r1")).standing is None


def test_an_abort_ends_the_stand() -> None:
    crowd = crowded(3)
    crowd.core.abort("r2")
    crowd.clock.advance(100.0)
    stand = standing(crowd, "r2")
    assert not stand.is_standing
    assert stand.seconds < 50
    assert crowd.tracker.num_standing() == 1
    crowd.to_end()
    assert standing(crowd, "r2").num_steps == stand.num_steps


def test_whoever_ends_leaves_its_seat_to_those_who_stand_and_its_place_to_the_queue() -> None:
    seated, stands, next_one = [Member(5, 2)], [Member(7, 2)], Next(2, 4)
    assert steps_until_seated(seated, stands) == 5
    assert steps_until_seated(seated, [*stands, Member(1, 2)]) == 12
    assert steps_until_admitted(seated, [next_one], 9, 0, stands) == 5
    assert steps_until_admitted(seated, [next_one, next_one], 9, 0, stands) == 12
    assert steps_until_admitted(seated, [next_one], 0, 0, stands) == 5
    assert steps_until_admitted(seated, [next_one], 0, 0) == 5
    assert steps_until_admitted([], [next_one], 0, 0, stands) is None
