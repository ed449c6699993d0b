"""Access to request states and events: a key reads its own requests, and an admin key those of all keys."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from chairlift import AsyncLLM
from chairlift.engine.process.client import EngineState, EngineStatus
from chairlift.events import RequestRejected
from chairlift.observability.event_log import encode_event
from chairlift.observability.tracker import RequestTracker
from chairlift.server.access.keys import Key, KeyRing, digest
from chairlift.server.api.engine import event_stream
from chairlift.server.api.health import NOT_RUNNING, STALL_SECONDS, readiness
from chairlift.server.telemetry import live_feed
from chairlift.server.telemetry.live_feed import LiveFeed
from chairlift.slo import SLO
from support.plain_http import NO_TLS
from support.running_server import RunningServer, run_server
from support.waiting import AMPLE_SECONDS, wait_for

KEYS = {"ann": False, "bob": False, "root": True}


@pytest.fixture(scope="module")
def shared(tiny_llm: Callable[..., AsyncLLM]) -> Iterator[RunningServer]:
    """A server with one seat and three keys."""
    slos = {"bob": SLO(ttft_ms=5)}
    keys = KeyRing(Key(name, digest(f"sk-{name}"), is_admin=admin, slo=slos.get(name)) for name, admin in KEYS.items())
    with run_server(tiny_llm(num_kv_blocks=20, max_num_seqs=1), "tiny", keys=keys) as running:
        running.slow_down(0.01)
        yield running


def get(server: RunningServer, path: str, name: str) -> httpx.Response:
    return httpx.get(
        server.url + path, headers={"Authorization": f"Bearer sk-{name}"}, timeout=AMPLE_SECONDS, verify=NO_TLS
    )


def run_two_calls(server: RunningServer) -> dict[str, str]:
    """Run a request of ann and one of bob, which waits longer for the seat than for a step. Return their ids."""
    body = {"prompt": [3, 4, 5], "max_tokens": 20, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        calls, scheduler = {}, server.llm.engine.core.scheduler  # type: ignore[attr-defined]
        with server.hold_steps() as gate:
            for count, name in enumerate(("ann", "bob"), start=1):
                start = time.monotonic()
                calls[name] = pool.submit(server.post, "/v1/completions", body, f"sk-{name}")
                wait_for(lambda count=count: server.llm.num_unfinished == count)
            gate.allow(1)
            wait_for(lambda: len(scheduler.unfinished) == 2)
            time.sleep(2 * (time.monotonic() - start))
        return {name: call.result().json()["id"] for name, call in calls.items()}


def test_a_key_sees_its_own_requests_and_opaque_ids_of_others(shared: RunningServer) -> None:
    calls = run_two_calls(shared)
    for path in (f"/v1/requests/{calls['ann']}", f"/v1/requests/{calls['ann']}/explain"):
        assert get(shared, path, "ann").status_code == 200
        assert get(shared, path, "root").status_code == 200
        rejected = get(shared, path, "bob")
        assert rejected.status_code == 404
        unknown = get(shared, path.replace(calls["ann"], "unknown"), "bob")
        assert rejected.text.replace(calls["ann"], "unknown") == unknown.text, "as if there were no such request"
    path = f"/v1/requests/{calls['bob']}/explain"
    text = get(shared, path, "bob").text
    assert calls["ann"] not in text
    (explained,) = json.loads(text)["sequences"]
    assert (explained["slo"]["ttft_ms"], explained["slo"]["missed"], explained["slo"]["cause"]) == (5, "ttft", "seats")
    (seats,) = (span for span in explained["waits"][0]["spans"] if span["reason"] == "seats")
    (member,) = seats["largest_holders"]
    assert member["id"].startswith("other-")
    assert member["num_blocks"] == 1
    assert calls["ann"] in get(shared, path, "root").text


def test_equal_request_ids_of_different_keys_are_distinct(shared: RunningServer) -> None:
    body = {"prompt": [3, 4, 5], "max_tokens": 20, "ignore_eos": True, "request_id": "mine"}

    def complete(name: str) -> httpx.Response:
        return shared.post("/v1/completions", body, f"sk-{name}")

    with ThreadPoolExecutor(3) as pool, shared.hold_steps():
        answers = {name: pool.submit(complete, name) for name in ("ann", "bob")}
        wait_for(lambda: shared.llm.num_unfinished == 2)
        again = complete("ann")
    assert again.status_code == 400
    assert "in use" in again.json()["error"]["message"]
    for answer in answers.values():
        assert answer.result().json()["usage"]["completion_tokens"] == 20
    seen = {name: get(shared, "/v1/requests/cmpl-mine", name).json()["sequences"] for name in KEYS}
    assert [len(seen[name]) for name in ("ann", "bob", "root")] == [1, 1, 2]
    assert seen["ann"] != seen["bob"]


def test_a_slow_event_reader_receives_the_number_of_lost_events(monkeypatch: pytest.MonkeyPatch) -> None:
    rejected = [RequestRejected(float(i), f"r{i}", "") for i in range(7)]
    monkeypatch.setattr(live_feed, "MAX_UNREAD_BYTES", 2 * len(encode_event(rejected[0])))

    async def read() -> list[str]:
        tracker = RequestTracker()
        feed = LiveFeed(tracker)
        stream = event_stream(SimpleNamespace(observer=SimpleNamespace(tracker=tracker), feed=feed))  # type: ignore[arg-type]
        feed.emit(rejected[0])
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not first.done(), "the stream begins with later events"
        for event in rejected[1:6]:
            feed.emit(event)
        parts = [await first, await anext(stream), await anext(stream)]
        feed.emit(rejected[6])
        return [part.decode() for part in (*parts, await anext(stream))]

    dropped, *events = asyncio.run(read())
    assert dropped == 'event: dropped\ndata: {"type": "dropped", "num_dropped": 3}\n\n'
    assert [json.loads(event.split("data: ")[1])["request_id"] for event in events] == ["r4", "r5", "r6"]


async def test_event_readers_are_woken_by_each_burst_and_read_all_of_it() -> None:
    tracker = RequestTracker()
    feed = LiveFeed(tracker)
    model = SimpleNamespace(observer=SimpleNamespace(tracker=tracker), feed=feed)
    streams = [event_stream(model) for _ in range(2)]  # type: ignore[arg-type]
    for number in range(3):
        following = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        assert not any(each.done() for each in following)
        for part in range(4):
            feed.emit(RequestRejected(0.0, f"r{number}.{part}", "x" * 1_000_000))
        for _ in range(5):  # Iterations of the event loop, in which no time passes.
            await asyncio.sleep(0)
        assert all(each.done() for each in following), "a reader that polls waits"
        for first, stream in zip(following, streams, strict=True):
            parts = [await first, *[await anext(stream) for _ in range(3)]]
            ids = [json.loads(each.partition(b"data: ")[2])["request_id"] for each in parts]
            assert ids == [f"r{number}.{part}" for part in range(4)]
    for stream in streams:
        await stream.aclose()
    assert not feed.num_readers


def obstacle(
    state: EngineState, unfinished: int = 0, stalled: float = 0.0, last_failure: str | None = None
) -> str | None:
    llm = SimpleNamespace(status=lambda: EngineStatus(state, 0, 3600.0, unfinished, stalled, last_failure))
    return check_readiness(llm)[1]


def check_readiness(*models: SimpleNamespace, is_admin: bool = True) -> tuple[bool, str | None]:
    admission = SimpleNamespace(is_draining=False)
    return readiness(SimpleNamespace(models=models), admission, is_admin=is_admin)  # type: ignore[arg-type]


def test_an_engine_that_restarts_or_has_died_is_not_ready() -> None:
    assert obstacle("running", 3) is None
    reasons = {state: obstacle(state, last_failure="SIGKILL") or "" for state in NOT_RUNNING}
    assert len(set(reasons.values())) == len(NOT_RUNNING) == 4
    assert reasons["restarting"] == "the engine died and is restarting: SIGKILL"
    assert "cannot be restarted" in reasons["cannot_restart"]


def test_a_hanging_engine_is_not_ready_but_an_idle_one_is() -> None:
    assert obstacle("running", 2, STALL_SECONDS - 1) is None
    stalled = obstacle("running", 2, STALL_SECONDS)
    assert stalled == "no step for 10 seconds with 2 unfinished requests"


def test_readiness_names_the_failure_to_admins_and_a_stuck_model_beside_others_to_all() -> None:
    def model(state: EngineState, stalled: float = 0.0) -> SimpleNamespace:
        status = EngineStatus(state, 0, 3600.0, 2, stalled, "/models/m.gguf is truncated")
        return SimpleNamespace(status=lambda: status)

    assert check_readiness(model("cannot_restart"))[1].endswith(": /models/m.gguf is truncated")  # type: ignore[union-attr]
    is_ready, reason = check_readiness(model("cannot_restart"), is_admin=False)
    assert not is_ready
    assert reason
    assert "m.gguf" not in reason
    stuck = "1 of 2 models cannot answer requests: no step for 30 seconds with 2 unfinished requests"
    assert check_readiness(model("running"), model("running", 30)) == (True, stuck)
