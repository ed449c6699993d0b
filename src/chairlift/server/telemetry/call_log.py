"""One record a call of the API, once it is over: for the access log, for traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.observability.tracked_request import TrackedRequest
from chairlift.server.access.keys import KeyInfo
from chairlift.server.api.call_usage import CallUsage
from chairlift.server.telemetry.engine_observer import EngineObserver

MAX_BODY_BYTES: Final = 4096
MAX_PATH_CHARACTERS: Final = 1024
UNLOGGED_PATHS: Final = frozenset({"/health", "/ready", "/metrics"})
"""Asked again and again by machines; their successes are not recorded."""


@dataclass(slots=True)
class CallRecord:
    """A call that is over.

    Attributes:
        time: when it began, seconds since the epoch; seconds: until the last byte of the answer was written.
        status: of the answer; 499 if the client left before there was one.
        key: whose it was; "" if nobody's.
        call_id: of the API's answer, if the call got as far as the engine; sequences: its requests to the engine.
        finish_reason: of the answer that ended first, as its reader was told; the engine hears of a stop string later.
        is_disconnected: the client left before the answer's end.
        body: its first bytes, if they are kept.
    """

    time: float
    method: str
    path: str
    client: str
    headers: dict[str, str] = field(repr=False)
    seconds: float = 0.0
    status: int = 499
    key: str = ""
    call_id: str | None = None
    sequences: list[TrackedRequest] = field(default_factory=list)
    finish_reason: str | None = None
    is_disconnected: bool = False
    body: bytes | None = None


CallListener = Callable[[CallRecord], None]


class CallLogMiddleware:
    """Tells the listeners of every call.

    Args:
        keeps_body: the first MAX_BODY_BYTES of what was asked are in the record.
    """

    def __init__(
        self, app: ASGIApp, observer: EngineObserver, listeners: Sequence[CallListener], keeps_body: bool = False
    ) -> None:
        self._app = app
        self._observatory = observer
        self._listeners = listeners
        self._keeps_body = keeps_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._listeners:
            await self._app(scope, receive, send)
            return
        record = _begin(scope)
        arrival = self._observatory.now()
        has_ended = False

        async def watched_send(message: Message) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                record.status = message["status"]
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def watched_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                record.body = ((record.body or b"") + message.get("body", b""))[:MAX_BODY_BYTES]
            return message

        started = time.perf_counter()
        try:
            await self._app(scope, watched_receive if self._keeps_body else receive, watched_send)
        finally:
            record.seconds = time.perf_counter() - started
            record.is_disconnected = not has_ended
            self._end(record, scope, arrival)

    def _end(self, record: CallRecord, scope: Scope, arrival: float) -> None:
        """An earlier call may have had the same id, or one of another key."""
        if record.path in UNLOGGED_PATHS and record.status < 400:
            return
        state = scope.get("state", {})
        key: KeyInfo | None = state.get("key")
        record.key = "" if key is None else key.name
        record.call_id = state.get("call_id")
        if record.call_id is not None and key is not None:
            own = (s for s in self._observatory.sequences(record.call_id) if s.tenant == key.tenant)
            record.sequences = [sequence for sequence in own if sequence.arrived.time >= arrival]
        usage: CallUsage | None = state.get("usage")
        record.finish_reason = None if usage is None else usage.finish_reason
        for listener in self._listeners:
            listener(record)


def _begin(scope: Scope) -> CallRecord:
    scope.setdefault("state", {})
    client = scope.get("client")
    return CallRecord(
        time=time.time(),
        method=scope["method"],
        path=scope["path"][:MAX_PATH_CHARACTERS],
        client="" if client is None else str(client[0]),
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
    )
