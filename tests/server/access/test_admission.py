"""Admission control, with a clock that the tests set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import OverloadedError, RequestError
from chairlift.outputs import CompletionOutput, RequestOutput
from chairlift.server.access.access_options import ServerLimits
from chairlift.server.access.admission import AdmissionController, Permit
from chairlift.server.access.call import Call
from chairlift.server.access.keys import ANONYMOUS, Key, KeyRing, digest
from chairlift.server.access.rate_limits import TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_controller(
    clock: Clock, limits: ServerLimits | None = None, **by_key: dict[str, float]
) -> AdmissionController:
    keys = [Key(name, name.encode(), **limits) for name, limits in by_key.items()]
    return AdmissionController(limits, KeyRing(keys), clock=clock)


def info(name: str) -> Key:
    return Key(name)


def output(num_tokens: int, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], [CompletionOutput(0, "", [7] * num_tokens)], finished)


def admit(
    controller: AdmissionController, key: Key = ANONYMOUS, prompt_len: int = 10, **options: float | str
) -> Permit:
    with controller.open_call(key) as permit:
        permit.admit([[0] * prompt_len], **options)  # type: ignore[arg-type]
        return permit


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    controller = make_controller(Clock(), ServerLimits(max_queued_requests=2, max_queued_tokens=100))
    permits = [admit(controller, prompt_len=40) for _ in range(2)]
    entries = [permit.track_prompt(40) for permit in permits]
    with pytest.raises(OverloadedError, match="2 waiting requests with 80 prompt tokens, and max_queued_requests=2"):
        admit(controller, prompt_len=1)
    entries[0](output(1))
    with pytest.raises(OverloadedError, match="max_queued_tokens=100") as rejected:
        admit(controller, prompt_len=61)
    assert rejected.value.code == "queue_full"
    assert rejected.value.retry_after == 1
    admit(controller, prompt_len=60).track_prompt(60)
    with pytest.raises(RequestError, match="101 tokens in one call"):
        admit(controller, prompt_len=101)


def test_requests_per_minute_refill_evenly() -> None:
    clock = Clock()
    controller = make_controller(clock, a={"requests_per_minute": 6})
    for _ in range(6):
        admit(controller, info("a"))
    with pytest.raises(OverloadedError, match=r"requests_per_minute=6, with 0 left: try again in 10.0 s"):
        admit(controller, info("a"))
    admit(controller, info("b"))
    clock.now += 10.0
    admit(controller, info("a"))
    with pytest.raises(OverloadedError):
        admit(controller, info("a"))


def test_output_tokens_count_towards_tokens_per_minute_as_they_are_generated() -> None:
    clock = Clock()
    controller = make_controller(clock, a={"tokens_per_minute": 60})
    entry = admit(controller, info("a"), prompt_len=20).track_prompt(20)
    entry(output(70))
    with pytest.raises(OverloadedError, match=r"try again in 40.0 s") as rejected:
        admit(controller, info("a"), prompt_len=10)
    assert rejected.value.retry_after == pytest.approx(40.0)
    clock.now += 39.6
    with pytest.raises(OverloadedError, match=r"with 9 left of the 10 that this call needs: try again in 400 ms"):
        admit(controller, info("a"), prompt_len=10)
    clock.now += 0.4
    admit(controller, info("a"), prompt_len=10)
    with pytest.raises(RequestError, match="the prompts have 61 tokens"):
        admit(controller, info("a"), prompt_len=61)


def test_a_call_without_the_engine_counts_as_a_request_and_uses_no_tokens() -> None:
    clock = Clock()
    controller = make_controller(clock, a={"requests_per_minute": 3, "tokens_per_minute": 60, "max_concurrent": 1})
    permit = admit(controller, info("a"), prompt_len=60)
    permit.track_prompt(60)(output(30))
    with pytest.raises(OverloadedError, match="max_concurrent"):
        controller.open_call(info("a"))
    permit.close()
    with pytest.raises(OverloadedError, match="tokens_per_minute=60, with 0 left"):
        admit(controller, info("a"), prompt_len=1)
    for _ in range(2):
        permit = controller.open_call(info("a"))
        controller.count_request(info("a"))
        permit.close()
    with pytest.raises(OverloadedError, match="requests_per_minute=3"):
        controller.open_call(info("a"))
    with pytest.raises(OverloadedError, match="requests_per_minute=3"):
        controller.count_request(info("a"))
    clock.now += 31.0
    admit(controller, info("a"), prompt_len=1)


def test_a_query_is_admitted_beyond_the_concurrent_calls_and_while_the_server_drains() -> None:
    clock = Clock()
    controller = make_controller(clock, a={"requests_per_minute": 3, "tokens_per_minute": 10, "max_concurrent": 1})
    admit(controller, info("a"), prompt_len=10)
    controller.is_draining = True
    controller.count_request(info("a"))
    controller.count_request(info("a"))
    with pytest.raises(OverloadedError, match=r"requests_per_minute=3, with 0 left: try again in 20\.0 s"):
        controller.count_request(info("a"))
    clock.now += 20.0
    controller.count_request(info("a"))


def test_a_rejected_call_uses_nothing_of_the_limits_of_its_key() -> None:
    clock = Clock()
    controller = make_controller(clock, a={"requests_per_minute": 2, "tokens_per_minute": 100, "max_concurrent": 9})
    admit(controller, info("a"), prompt_len=90)
    for _ in range(5):
        with pytest.raises(OverloadedError, match="tokens_per_minute"):
            admit(controller, info("a"), prompt_len=20)
    admit(controller, info("a"), prompt_len=10)


def test_no_call_is_admitted_while_the_server_drains() -> None:
    controller = make_controller(Clock(), ServerLimits(drain_timeout=7.0))
    controller.is_draining = True
    with pytest.raises(OverloadedError, match="shutting down") as rejected:
        admit(controller)
    assert (rejected.value.code, rejected.value.retry_after) == ("shutting_down", 7.0)


def test_salts_separate_keys_and_request_salts() -> None:
    controller, shared = make_controller(Clock()), make_controller(Clock(), ServerLimits(share_prefix_cache=True))
    assert admit(controller).cache_salt is None
    pairs = [("a", None), ("b", None), ("a", "x"), ("b", "x"), ("a1", "x"), ("a", "1x"), ("", "x"), ("", "a:x")]
    salts = [
        admit(controller, info(name), **({} if salt is None else {"cache_salt": salt})).cache_salt
        for name, salt in pairs
    ]
    assert len(set(salts)) == len(pairs)
    assert admit(shared, info("a")).cache_salt is None
    assert admit(shared, info("a"), cache_salt="x").cache_salt == admit(shared, info("b"), cache_salt="x").cache_salt


@given(per_minute=st.floats(0.5, 500), calls=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_a_bucket_never_gives_more_than_its_capacity_and_its_rate(
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


def test_a_permit_has_the_deadline_of_its_call() -> None:
    clock = Clock()
    assert admit(make_controller(clock), timeout=20.0).deadline == clock.now + 20.0


def test_a_stream_whose_key_is_revoked_before_its_first_event_has_no_event() -> None:
    async def source() -> AsyncGenerator[bytes, None]:
        yield b"event"

    async def bodies(*keys: Key) -> list[bytes]:
        """The bodies of a stream that was opened with a key, where the server then has other keys."""
        sent: list[bytes] = []
        key = Key("ann", digest("secret"))
        ring = KeyRing([key])
        stream = AdmissionController(keys=ring).open_events(Call("GET", "/v1/events", key=key), source())
        ring.by_tenant = KeyRing(keys).by_tenant

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        await stream({"type": "http"}, asyncio.Event().wait, send)
        return [body for body in sent if body]

    assert asyncio.run(bodies(Key("ann", digest("secret")))) == [b"event"]
    assert asyncio.run(bodies(Key("ann", digest("another")))) == []
    assert asyncio.run(bodies()) == []


def test_the_queue_counts_each_answer_and_the_lists_of_the_parameters() -> None:
    controller = make_controller(Clock(), ServerLimits(max_queued_requests=10, max_queued_tokens=200))
    with controller.open_call(ANONYMOUS) as permit:
        permit.admit([[0] * 5, [0] * 10], num_answers=4, params_size=20)
        records = [permit.track_prompt(5, 4), permit.track_prompt(10, 4)]
    assert (controller.num_queued_requests, controller.num_queued_tokens) == (8, 4 * 15 + 2 * 20)
    with pytest.raises(OverloadedError, match="8 waiting requests"):
        admit(controller, num_answers=3)
    with pytest.raises(OverloadedError, match="max_queued_tokens=200"):
        admit(controller, params_size=95)
    second_answer = RequestOutput("r", None, [1], [CompletionOutput(1, "", [7])], False)
    for _ in range(2):
        records[1](second_answer)
    assert (controller.num_queued_requests, controller.num_queued_tokens) == (7, 90)
    permit.close()
    assert (controller.num_queued_requests, controller.num_queued_tokens) == (0, 0)
    with pytest.raises(RequestError, match=r"11 requests in one call.*ask for fewer answers"):
        admit(controller, num_answers=11)


def test_concurrent_sequences_are_limited() -> None:
    controller = make_controller(Clock(), a={"max_concurrent": 5})
    first = admit(controller, info("a"), num_answers=3)
    with pytest.raises(OverloadedError, match=r"3 sequences .* has 3 more, and the limit is max_concurrent=5") as error:
        admit(controller, info("a"), num_answers=3)
    assert error.value.code == "concurrent_limit_exceeded"
    assert error.value.retry_after == 1
    with pytest.raises(RequestError, match=r"6 sequences .* max_concurrent=5: ask for fewer answers"):
        admit(controller, info("a"), num_answers=6)
    second = admit(controller, info("a"), num_answers=2)
    assert controller.num_concurrent() == {"a": 5}
    for permit in (first, second):
        permit.close()
    assert controller.num_concurrent() == {}
    admit(controller, info("a"), num_answers=5)


def test_tokens_per_minute_count_a_prompt_once_for_each_answer() -> None:
    controller = make_controller(Clock(), a={"tokens_per_minute": 100})
    admit(controller, info("a"), prompt_len=20, num_answers=4)
    with pytest.raises(OverloadedError, match="tokens_per_minute=100, with 20 left"):
        admit(controller, info("a"), prompt_len=11, num_answers=2)
