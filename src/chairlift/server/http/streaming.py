"""The work of calls, which is cancelled, and aborted in the engine, when the client disconnects: coroutines, streamed
responses, and functions on threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

PING_SECONDS: Final = 15.0
"""Seconds between two checks whether a stream is silent. One that has sent nothing since the last check sends a ping:
no silence is longer than 30 s. Proxies close a silent connection after 50 s (HAProxy), 60 s (nginx, AWS) or 100 s
(Cloudflare)."""

COMMENT: Final = b": keep-alive\n\n"
"""A ping that clients of server-sent events ignore."""


async def cancel_on_disconnect(
    receive: Receive, work: Coroutine[Any, Any, Result], on_close: Callable[[], None] | None = None
) -> Result:
    """Run a coroutine and return its result. If the client disconnects first, cancel it and raise ClientDisconnect.

    Args:
        receive: receives the messages of a request whose body has been read.
        on_close: called when the coroutine has ended or the client has disconnected, before the coroutine is cancelled.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        if on_close is not None:
            on_close()
        for pending in (task, disconnected):
            pending.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def run_to_end(work: Future[Result]) -> Result:
    """Wait for a call on a thread. If this wait is cancelled, a call that waits is cancelled, and one that runs is
    waited for, so that the caller keeps its slot and its lease as long as the thread works."""
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:
        if not work.cancel():
            await asyncio.gather(asyncio.wrap_future(work), return_exceptions=True)
        raise


class EventStream(Response):
    """A response of server-sent events.

    Args:
        source: the events. It is closed when the client disconnects, even before the first event.
        on_close: called when the response has ended for any reason.
        ping: what the response sends while its source is silent.
        ping_seconds: the seconds between two checks; below 0 it sends no pings. None is PING_SECONDS.
        pings_after_event: whether it also sends pings after the first event.
    """

    def __init__(
        self,
        source: AsyncIterator[bytes],
        on_close: Callable[[], None],
        ping: bytes = COMMENT,
        media_type: str = "text/event-stream",
        ping_seconds: float | None = None,
        pings_after_event: bool = True,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._source = source
        self._on_close = on_close
        self._ping = ping
        self._ping_seconds = PING_SECONDS if ping_seconds is None else ping_seconds
        self._pings_after_event = pings_after_event
        self._num_events = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The engine's requests are aborted and the key's seat is free before the tasks are unwound.
        with suppress(ClientDisconnect):
            await cancel_on_disconnect(receive, self._send_all(send), on_close=self._on_close)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pings = asyncio.ensure_future(self._send_pings(send))
        try:
            async with aclosing(self._source) as source:  # type: ignore[type-var]
                async for event in source:
                    self._num_events += 1
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pings(self, send: Send) -> None:
        """Send a ping whenever no event was sent between two checks. An event costs no timer."""
        while self._ping_seconds >= 0 and (self._pings_after_event or not self._num_events):
            num_events = self._num_events
            await asyncio.sleep(self._ping_seconds)
            if self._num_events == num_events:
                await send({"type": "http.response.body", "body": self._ping, "more_body": True})
