"""Opens each call of the API, gives its response an id, and records it when it has ended, for access log and traces."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.access.call import CLIENT_CLOSED_REQUEST, Call, is_public
from chairlift.server.http.error_responses import route_path
from chairlift.server.protocol.sampling import MAX_REQUEST_ID, REQUEST_ID_PATTERN
from chairlift.server.telemetry.engine_observer import ObservedRequest

MAX_PATH_CHARACTERS: Final = 1024
MAX_REASON_CHARACTERS: Final = 200

CallListener = Callable[[Call, list[ObservedRequest]], None]
"""Receives a call that has ended and its requests in the engine. One that was sent again after the loss of a replica is
there twice."""


class CallLogMiddleware:
    """Sets `request.state.call`, adds its id to the headers of each response, and passes each call to the
    listeners when it has ended, with those of its sequences that `find` returns for its id."""

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
        call = scope.setdefault("state", {})["call"] = _opened_call(scope)
        has_ended = False

        async def recording_send(message: Message) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                call.status = message["status"]
                # Clients of OpenAI read the first name, and clients of Anthropic the second.
                MutableHeaders(scope=message).update({"x-request-id": call.response_id, "request-id": call.response_id})
            elif call.status >= HTTPStatus.BAD_REQUEST and not call.reason:
                call.reason = error_reason(message.get("body", b""))
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        started = time.perf_counter()
        try:
            await self._app(scope, receive, recording_send)
        finally:
            call.seconds = time.perf_counter() - started
            call.is_disconnected = not has_ended
            # Monitoring polls public paths, or a browser reads a page.
            if self._listeners and not (is_public(call.path) and call.status < HTTPStatus.BAD_REQUEST):
                self._report(call, started)

    def _report(self, call: Call, started: float) -> None:
        """Report a call and its sequences. Earlier calls, and calls of other keys, may have the same call id."""
        sequences: list[ObservedRequest] = []
        if call.id is not None:
            sequences = [
                each
                for each in self._find(call.id)
                # The age is read first: time that passes between the two clocks must not make a request too old.
                if each.request.tenant == call.key.tenant
                and each.observer.now() - each.request.arrived.time <= time.perf_counter() - started
            ]
            if call.is_disconnected:
                call.status = CLIENT_CLOSED_REQUEST
        for listener in self._listeners:
            listener(call, sequences)


def _opened_call(scope: Scope) -> Call:
    headers, client = Headers(scope=scope), scope.get("client")
    call = Call(
        scope["method"],
        route_path(scope)[:MAX_PATH_CHARACTERS],
        "" if client is None else str(client[0]),
        headers,
        time=time.time(),
    )
    given = headers.get("x-request-id", "")
    if len(given) <= MAX_REQUEST_ID and re.fullmatch(REQUEST_ID_PATTERN, given):
        call.request_id = given
    return call


def error_reason(body: bytes) -> str:
    """The message in the body of an error response, without the value that the client sent: it may be a prompt."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""
    return message.partition(", got ")[0][:MAX_REASON_CHARACTERS]
