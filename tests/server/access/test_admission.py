"""Who is let in, by a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.clock import format_duration
from chairlift.errors import DeadlineError, OverloadedError, RequestError
from chairlift.outputs import CompletionOutput, RequestOutput
from chairlift.sampling_params import SamplingParams
from chairlift.server.access.admission import AdmissionController, Permit
from chairlift.server.access.keys import ANONYMOUS, Key, KeyInfo, KeyLimits, KeyRing
from chairlift.server.access.rate_limits import TokenBucket
from chairlift.server.access.server_limits import ServerLimits

PARAMS = SamplingParams(max_tokens=10)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def admission(
    clock: Clock, limits: ServerLimits | None = None, is_fair: bool = False, **by_key: KeyLimits
) -> AdmissionController:
    keys = [Key(info(name), name.encode(), key_limits) for name, key_limits in by_key.items()]
    return AdmissionController(limits, KeyRing(keys), is_fair=is_fair, clock=clock)


def info(name: str) -> KeyInfo:
    return KeyInfo(name, name, False)


def output(num_tokens: int, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], [CompletionOutput(0, "", [7] * num_tokens)], finished)


def enter(door: AdmissionController, key: KeyInfo = ANONYMOUS, prompt_len: int = 10, **options: float | str) -> Permit:
    return door.admit(key, [[0] * prompt_len], PARAMS, **options)  # type: ignore[arg-type]


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    door = admission(Clock(), ServerLimits(max_queued_requests=2, max_queued_tokens=100))
    permits = [enter(door, prompt_len=40) for _ in range(2)]
    entries = [permit.track_prompt(40) for permit in permits]
    with pytest.raises(OverloadedError, match="2 requests with 80 prompt tokens wait, and max_queued_requests=2"):
        enter(door, prompt_len=1)
    entries[0].record_output(output(1))
    with pytest.raises(OverloadedError, match="max_queued_tokens=100") as refused:
        enter(door, prompt_len=61)
    assert refused.value.code == "queue_full"
    assert refused.value.retry_after >= 1
    enter(door, prompt_len=60).track_prompt(60)
    with pytest.raises(RequestError, match="101 tokens in one call"):
        enter(door, prompt_len=101)


def test_retry_after_follows_the_pace_that_was_seen() -> None:
    clock = Clock()
    door = admission(clock, ServerLimits(max_queued_requests=20))
    entries = [enter(door).track_prompt(10) for _ in range(20)]
    for entry in entries[:10]:
        clock.now += 2.0
        entry.record_output(output(1))
    for _ in range(10):
        enter(door).track_prompt(10)
    with pytest.raises(OverloadedError) as refused:
        door.admit(ANONYMOUS, [[0] * 10] * 5, PARAMS)
    assert refused.value.retry_after == pytest.approx(10.0, rel=0.1), "five are through in 5 x 2 s"


def test_a_call_that_ends_early_leaves_the_queue() -> None:
    door = admission(Clock())
    permit = enter(door)
    permit.track_prompt(10)
    assert (door.queue.num_requests, door.queue.num_tokens, door.num_calls) == (1, 10, 1)
    permit.close()
    permit.close()
    assert (door.queue.num_requests, door.queue.num_tokens, door.num_calls) == (0, 0, 0)


def test_requests_per_minute_refill_evenly() -> None:
    clock = Clock()
    door = admission(clock, a=KeyLimits(requests_per_minute=6))
    for _ in range(6):
        enter(door, info("a"))
    with pytest.raises(OverloadedError, match=r"requests_per_minute=6, and 0 are left: try again in 10.0 s"):
        enter(door, info("a"))
    enter(door, info("b"))
    clock.now += 10.0
    enter(door, info("a"))
    with pytest.raises(OverloadedError):
        enter(door, info("a"))


def test_tokens_per_minute_count_answers_when_they_come() -> None:
    clock = Clock()
    door = admission(clock, a=KeyLimits(tokens_per_minute=60))
    entry = enter(door, info("a"), prompt_len=20).track_prompt(20)
    entry.record_output(output(70))
    with pytest.raises(OverloadedError, match=r"try again in 40.0 s") as refused:
        enter(door, info("a"), prompt_len=10)
    assert refused.value.retry_after == pytest.approx(40.0)
    clock.now += 40.0
    enter(door, info("a"), prompt_len=10)
    with pytest.raises(RequestError, match="the prompts have 61 tokens"):
        enter(door, info("a"), prompt_len=61)


def test_calls_at_once_are_counted_until_they_end() -> None:
    door = admission(Clock(), a=KeyLimits(max_concurrent=2))
    first, _second = enter(door, info("a")), enter(door, info("a"))
    with pytest.raises(OverloadedError, match="max_concurrent"):
        enter(door, info("a"))
    first.close()
    enter(door, info("a"))


def test_token_counts_take_requests_and_no_tokens() -> None:
    clock = Clock()
    door = admission(clock, a=KeyLimits(requests_per_minute=3, tokens_per_minute=60, max_concurrent=1))
    permit = enter(door, info("a"), prompt_len=60)
    permit.track_prompt(60).record_output(output(30))
    with pytest.raises(OverloadedError, match="max_concurrent"), door.admit_utility_call(info("a")):
        pass
    permit.close()
    with pytest.raises(OverloadedError, match="tokens_per_minute=60, and 0 are left"):
        enter(door, info("a"), prompt_len=1)
    for _ in range(2):
        with door.admit_utility_call(info("a")):
            assert door.num_calls == 1
    with pytest.raises(OverloadedError, match="requests_per_minute=3"), door.admit_utility_call(info("a")):
        pass
    clock.now += 31.0
    enter(door, info("a"), prompt_len=1)


def test_a_question_about_calls_is_a_request_but_not_one_at_once() -> None:
    clock = Clock()
    door = admission(clock, a=KeyLimits(requests_per_minute=3, tokens_per_minute=10, max_concurrent=1))
    enter(door, info("a"), prompt_len=10)
    door.is_draining = True
    door.admit_query(info("a"))
    door.admit_query(info("a"))
    with pytest.raises(OverloadedError, match=r"requests_per_minute=3, and 0 are left: try again in 20\.0 s"):
        door.admit_query(info("a"))
    clock.now += 20.0
    door.admit_query(info("a"))


def test_an_admin_may_always_ask() -> None:
    door = admission(Clock(), a=KeyLimits(requests_per_minute=1))
    for _ in range(5):
        door.admit_query(KeyInfo("a", "a", True))
    enter(door, info("a"))


def test_a_refused_call_costs_its_key_nothing() -> None:
    clock = Clock()
    door = admission(clock, a=KeyLimits(requests_per_minute=2, tokens_per_minute=100, max_concurrent=9))
    enter(door, info("a"), prompt_len=90)
    for _ in range(5):
        with pytest.raises(OverloadedError, match="tokens_per_minute"):
            enter(door, info("a"), prompt_len=20)
    enter(door, info("a"), prompt_len=10)


def test_a_timeout_that_cannot_be_met_is_refused_at_once() -> None:
    clock = Clock()
    door = admission(clock)
    enter(door, timeout=0.001)  # nothing was seen yet that speaks against it
    entries = [enter(door).track_prompt(10) for _ in range(20)]
    for entry in entries[:10]:
        clock.now += 1.0
        entry.record_output(output(1))
    assert [format_duration(seconds) for seconds in (11.04, 0.96, 0.3, 0.0312, 0.0009)] == [
        "11.0 s", "1.0 s", "300 ms", "31 ms", "0.9 ms"
    ]  # fmt: skip
    with pytest.raises(DeadlineError, match="timeout=5 s cannot be met: it would take about 11"):
        enter(door, timeout=5.0)
    permit = enter(door, timeout=20.0)
    assert permit.deadline == clock.now + 20.0


def test_a_forced_length_counts_towards_the_timeout() -> None:
    clock = Clock()
    door = admission(clock)
    entry = enter(door).track_prompt(10)
    entry.record_output(output(1))
    clock.now += 10.0
    entry.record_output(output(100, finished=True))
    forced = SamplingParams(max_tokens=51, ignore_eos=True)
    with pytest.raises(DeadlineError, match=r"it would take about 5.0 s"):
        door.admit(ANONYMOUS, [[0]], forced, timeout=4.0)
    door.admit(ANONYMOUS, [[0]], forced, timeout=5.5)
    enter(door, timeout=4.0)


def test_under_fair_scheduling_another_tenants_crowd_does_not_count() -> None:
    clock = Clock()
    for is_fair in (False, True):
        door = admission(clock, is_fair=is_fair)
        entries = [enter(door, info("a")).track_prompt(10) for _ in range(60)]
        for entry in entries[:30]:
            clock.now += 1.0
            entry.record_output(output(1))
        if is_fair:
            enter(door, info("b"), timeout=3.0)
        else:
            with pytest.raises(DeadlineError):
                enter(door, info("b"), timeout=3.0)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(timeout: float) -> None:
    with pytest.raises(RequestError, match="timeout must be"):
        enter(admission(Clock()), timeout=timeout)


def test_nobody_is_let_in_while_the_server_drains() -> None:
    door = admission(Clock(), ServerLimits(drain_timeout=7.0))
    door.is_draining = True
    with pytest.raises(OverloadedError, match="shutting down") as refused:
        enter(door)
    assert (refused.value.code, refused.value.retry_after) == ("shutting_down", 7.0)


def test_salts_tell_keys_and_callers_apart() -> None:
    door, shared = admission(Clock()), admission(Clock(), ServerLimits(share_prefix_cache=True))
    assert enter(door).cache_salt is None
    pairs = [("a", None), ("b", None), ("a", "x"), ("b", "x"), ("a1", "x"), ("a", "1x"), ("", "x"), ("", "a:x")]
    salts = [
        enter(door, info(name), **({} if salt is None else {"cache_salt": salt})).cache_salt for name, salt in pairs
    ]
    assert len(set(salts)) == len(pairs)
    assert enter(shared, info("a")).cache_salt is None
    assert enter(shared, info("a"), cache_salt="x").cache_salt == enter(shared, info("b"), cache_salt="x").cache_salt


@given(
    per_minute=st.floats(0.5, 500),
    calls=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), max_size=40),
)
@settings(max_examples=100, deadline=None)
def test_a_bucket_never_gives_more_than_a_burst_and_its_rate(
    per_minute: float, calls: list[tuple[float, float]]
) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    now = taken = 0.0
    for pause, amount in calls:
        now += pause
        wait = bucket.seconds_until(amount, now)
        if amount <= per_minute and wait == 0:
            bucket.take(amount, now)
            taken += amount
        elif amount <= per_minute:
            assert bucket.level(now) < amount
        assert taken <= per_minute * (1 + now / 60) + 1e-6
        assert -1e-9 <= bucket.level(now) <= per_minute
