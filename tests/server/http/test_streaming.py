"""A streamed response is closed when the client disconnects, and sends pings while it is silent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift.server.api.messages import MessagesCall
from chairlift.server.http import streaming
from chairlift.server.http.streaming import COMMENT, EventStream, run_to_end
from chairlift.server.preparation.api_options import ApiOptions
from support.waiting import AMPLE_SECONDS, until


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"data: x\n\n"
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("blocked_at", ["http.response.start", "http.response.body"])
async def test_the_response_is_closed_when_the_client_disconnects(blocked_at: str) -> None:
    closed: list[bool] = []
    sent: list[str] = []

    disconnected = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == blocked_at:
            disconnected.set()
            await asyncio.sleep(60)

    response = EventStream(endless(), on_close=lambda: closed.append(True))
    await asyncio.wait_for(response({"type": "http"}, receive, send), timeout=AMPLE_SECONDS)
    assert closed == [True]
    assert sent[-1] == blocked_at


async def test_the_call_is_closed_before_its_tasks_end() -> None:
    """The engine's requests are aborted even if a task takes long to end."""
    ended: list[str] = []

    async def events() -> AsyncIterator[bytes]:
        try:
            yield b"data: x\n\n"
            await asyncio.sleep(60)
        finally:
            ended.append("task")

    disconnected = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            disconnected.set()

    response = EventStream(events(), on_close=lambda: ended.append("call"))
    await asyncio.wait_for(response({"type": "http"}, receive, send), timeout=AMPLE_SECONDS)
    assert ended == ["call", "task"]


def send_all(source: AsyncIterator[bytes], ping: bytes, on_send: Callable[[bytes], None], **options: Any) -> None:
    """Run a stream to its end; its client stays connected."""

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            on_send(message["body"])

    async def run() -> None:
        response = EventStream(source, on_close=lambda: None, ping=ping, **options)
        await asyncio.wait_for(response({"type": "http"}, asyncio.Event().wait, send), timeout=AMPLE_SECONDS)  # type: ignore[arg-type]

    asyncio.run(run())


@pytest.mark.parametrize("ping", [COMMENT, MessagesCall.ping])
def test_a_silent_stream_sends_pings(ping: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first event, and between events."""
    monkeypatch.setattr(streaming, "PING_SECONDS", 0)
    sent: list[bytes] = []

    async def events() -> AsyncIterator[bytes]:
        for number in (3, 7):
            while len(sent) < number:
                await asyncio.sleep(0)
            yield b"data: x\n\n"

    send_all(events(), ping, sent.append)
    assert [body for body in sent if body != ping] == [b"data: x\n\n"] * 2 + [b""]
    assert sent[:3] == [ping] * 3
    assert sent[-1] == b""


@pytest.mark.parametrize(("seconds", "after_event", "expected"), [(0, False, 3), (-1, True, 0)])
def test_pings_end_with_the_first_event_or_are_turned_off(seconds: float, after_event: bool, expected: int) -> None:
    sent: list[bytes] = []

    async def events() -> AsyncIterator[bytes]:
        while len(sent) < expected:
            await asyncio.sleep(0)
        yield b"data: x\n\n"
        for _ in range(100):
            await asyncio.sleep(0)
        yield b"data: y\n\n"

    send_all(events(), COMMENT, sent.append, ping_seconds=seconds, pings_after_event=after_event)
    assert sent[expected:] == [b"data: x\n\n", b"data: y\n\n", b""]
    assert sent[:expected] == [COMMENT] * expected


@pytest.mark.parametrize("seconds", [0.0, -0.5])
def test_an_interval_that_is_no_time_is_rejected(seconds: float) -> None:
    with pytest.raises(ConfigError, match=rf"sse_ping_interval must be above 0, or -1 for none, got {seconds:g}"):
        ApiOptions(sse_ping_interval=seconds)


def test_a_stream_of_events_sends_no_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is sent in each iteration of the event loop, between any two checks."""
    monkeypatch.setattr(streaming, "PING_SECONDS", 0)
    sent: list[bytes] = []

    async def events() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"data: x\n\n"
            await asyncio.sleep(0)

    send_all(events(), COMMENT, sent.append)
    assert sent == [b"data: x\n\n"] * 100 + [b""]


async def test_a_cancelled_call_ends_with_the_work_of_its_thread() -> None:
    started, release = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait(AMPLE_SECONDS)

    threads = ThreadPoolExecutor(1)
    running = asyncio.create_task(run_to_end(threads.submit(work)))
    await until(started.is_set)
    waiting = asyncio.create_task(run_to_end(threads.submit(started.clear)))
    await asyncio.sleep(0)
    for task in (running, waiting):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not running.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    threads.shutdown()
    assert started.is_set()  # The call that waited was not run.
