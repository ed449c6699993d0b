"""A streamed response is closed when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chairlift.server.http.streaming import EventStream


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"data: x\n\n"
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("blocked_at", ["http.response.start", "http.response.body"])
def test_the_response_is_closed_when_the_client_disconnects(blocked_at: str) -> None:
    closed: list[bool] = []
    sent: list[str] = []

    async def run() -> None:
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
        await asyncio.wait_for(response({"type": "http"}, receive, send), timeout=30)

    asyncio.run(run())
    assert closed == [True]
    assert sent[-1] == blocked_at


def test_the_call_is_closed_before_its_tasks_end() -> None:
    """The engine's requests are aborted even if a task takes long to end."""
    ended: list[str] = []

    async def events() -> AsyncIterator[bytes]:
        try:
            yield b"data: x\n\n"
            await asyncio.sleep(60)
        finally:
            ended.append("task")

    async def run() -> None:
        disconnected = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                disconnected.set()

        response = EventStream(events(), on_close=lambda: ended.append("call"))
        await asyncio.wait_for(response({"type": "http"}, receive, send), timeout=30)

    asyncio.run(run())
    assert ended == ["call", "task"]
