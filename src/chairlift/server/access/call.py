"""The record of one call of the API, which the layers of the server fill in."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from chairlift.server.access.keys import NO_KEY, Key

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics", "/version", "/", "/chat", "/docs", "/openapi.json"})
"""Paths for probes and monitoring and the pages, which need no key. Their responses contain nothing about single
requests; the scripts of the pages ask for a key."""

PUBLIC_FILES = ("/page/", "/docs/")
"""The beginnings of the paths of the pages' scripts and styles."""

CLIENT_CLOSED_REQUEST: Final = 499


def is_public(path: str) -> bool:
    """Whether a path needs no key."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_FILES)


@dataclass(slots=True)
class Call:
    """One call of the API, from its arrival to the end of its response. It is `request.state.call`.

    Attributes:
        key: the key of the caller; one without rights until `key_filter` has found another.
        time: the arrival, in seconds since the epoch.
        request_id: the id of the header `x-request-id` of the client, or a random one. The id of its response ends in
            it, unless the body has another `request_id`, or a call in progress has the same id.
        model_seconds: the seconds for which the call waited until its model was loaded.
        id: the id of its requests in the engine and of their explanation; None until they are sent to the engine, or
            the wait for a model fails.
        model: the name of the model or adapter that answers it; empty until it is known.
        finish_reason: the reason of the first answer to end. For a stop string it is known before the engine's event.
        ignored: the fields of its body that have no effect.
        seconds: the duration until the last byte of the response was written.
        status: the status of the response; 499 if the client disconnected before it, or before the end of an answer.
        is_disconnected: the client disconnected before the end of the response.
        reason: the message of an error, without the value that the client sent.
    """

    method: str
    path: str
    client: str = ""
    headers: Headers = field(default_factory=Headers, repr=False)
    key: Key = NO_KEY
    time: float = 0.0
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    model_seconds: float = 0.0
    id: str | None = None
    model: str = ""
    finish_reason: str | None = None
    ignored: list[str] = field(default_factory=list)
    seconds: float = 0.0
    status: int = CLIENT_CLOSED_REQUEST
    is_disconnected: bool = False
    reason: str = ""

    @property
    def response_id(self) -> str:
        """The id in the headers of its response, which may be an error, and in the access log."""
        return self.id or self.request_id


def call_of(request: HTTPConnection) -> Call:
    call: Call = request.state.call
    return call


def require_admin(request: HTTPConnection, effect: str) -> None:
    """Raise HTTPException 403 if a request has no admin key."""
    if not call_of(request).key.is_admin:
        raise HTTPException(403, f"{request.url.path} {effect} and needs an admin key")
