"""Opens each call of the API, gives its response an id, and records it when it has ended, for access log and traces."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.access.call import Call, is_public
from chairlift.server.http.root_path import route_path
from chairlift.server.protocol.sampling import MAX_REQUEST_ID, REQUEST_ID_PATTERN
from chairlift.server.telemetry.engine_observer import ObservedRequest

MAX_PATH_CHARACTERS: Final = 1024
MAX_REASON_CHARACTERS: Final = 200
CLIENT_CLOSED_REQUEST: Final = 499


@dataclass(slots=True)
class CallRecord:
    """A call that has ended.

    Attributes:
        time: the beginning of the call, in seconds since the epoch.
        seconds: the duration until the last byte of the response was written.
        status: the status of the response; 499 if the client disconnected before it, or before the end of an answer.
        call: the record that the layers of the server fill in.
        sequences: its requests in the engine. One that was sent again after the loss of a replica is in it twice.
        is_disconnected: the client disconnected before the end of the response.
        reason: the message of an error, without the value that the client sent.
    """

    time: float
    method: str
    path: str
    client: str
    headers: dict[str, str] = field(repr=False)
    seconds: float = 0.0
    status: int = CLIENT_CLOSED_REQUEST
    call: Call = field(default_factory=Call)
    sequences: list[ObservedRequest] = field(default_factory=list)
    is_disconnected: bool = False
    reason: str = ""


CallListener = Callable[[CallRecord], None]


class CallLogMiddleware:
    """Sets `request.state.call`, adds its id to the headers of each response, and passes a record of each call to the
    listeners when it has ended.

    Args:
        find: returns the known sequences of a call in the engines, by its id.
    """

    def __init__(
        self, app: ASGIApp, find: Callable[[str], list[ObservedRequest]], listeners: Sequence[CallListener]
    ) -> None:
        self._app = app
        self._find = find
        self._listeners = listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _new_record(scope)
        call = scope.setdefault("state", {})["call"] = record.call
        has_ended = False

        async def recording_send(message: Message) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                record.status = message["status"]
                # Clients of OpenAI read the first name, and clients of Anthropic the second.
                MutableHeaders(scope=message).update({"x-request-id": call.response_id, "request-id": call.response_id})
            elif record.status >= HTTPStatus.BAD_REQUEST and not record.reason:
                record.reason = error_reason(message.get("body", b""))
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        started = time.perf_counter()
        try:
            await self._app(scope, receive, recording_send)
        finally:
            record.seconds = time.perf_counter() - started
            record.is_disconnected = not has_ended
            self._end(record, started)

    def _end(self, record: CallRecord, started: float) -> None:
        """Complete the record. Earlier calls, and calls of other keys, may have the same call id."""
        # Monitoring polls public paths, or a browser reads a page.
        call = record.call
        if not self._listeners or (is_public(record.path) and record.status < HTTPStatus.BAD_REQUEST):
            return
        if call.id is not None:
            record.sequences = [
                each
                for each in self._find(call.id)
                # The age is read first: time that passes between the two clocks must not make a request too old.
                if each.request.tenant == call.key.tenant
                and each.observer.now() - each.request.arrived.time <= time.perf_counter() - started
            ]
        if record.is_disconnected and call.id is not None:
            record.status = CLIENT_CLOSED_REQUEST
        for listener in self._listeners:
            listener(record)


def _new_record(scope: Scope) -> CallRecord:
    client = scope.get("client")
    given = Headers(scope=scope).get("x-request-id", "")
    is_valid = len(given) <= MAX_REQUEST_ID and re.fullmatch(REQUEST_ID_PATTERN, given)
    return CallRecord(
        time=time.time(),
        method=scope["method"],
        path=route_path(scope)[:MAX_PATH_CHARACTERS],
        client="" if client is None else str(client[0]),
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
        call=Call(request_id=given) if is_valid else Call(),
    )


def error_reason(body: bytes) -> str:
    """The message in the body of an error response, without the value that the client sent: it may be a prompt."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""
    return message.partition(", got ")[0][:MAX_REASON_CHARACTERS]
