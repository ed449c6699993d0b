"""Call: what the layers of the server know of one call of the API."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from chairlift.server.access.admission import CallSlot
from chairlift.server.access.keys import KeyInfo


@dataclass(slots=True)
class Call:
    """One call of the API, from the check of its key to the end of its response. It is `request.state.call`.

    Attributes:
        slot: counts the call while its body is parsed and planned.
        request_id: the id that the server chose for it when it waited for its model.
        model_seconds: the time for which it waited for its model.
        id: the id of its response, once its requests are sent to the engine.
        finish_reason: that of its answer that finished first.
        ignored: the fields of its body that have no effect.
    """

    key: KeyInfo
    slot: CallSlot | None = None
    request_id: str | None = None
    model_seconds: float = 0.0
    id: str | None = None
    finish_reason: str | None = None
    ignored: list[str] = field(default_factory=list)


def is_admin_call(request: HTTPConnection) -> bool:
    """Whether a request has an admin key. One that `KeyMiddleware` has not accepted has none."""
    call: Call | None = getattr(request.state, "call", None)
    return call is not None and call.key.is_admin


def call_of(request: HTTPConnection) -> Call:
    """The call of a request that `KeyMiddleware` has accepted."""
    call: Call = request.state.call
    return call


def require_admin(request: HTTPConnection, effect: str) -> None:
    """Raise HTTPException 403 if a request that `KeyMiddleware` has accepted has no admin key."""
    if not call_of(request).key.is_admin:
        raise HTTPException(403, f"{request.url.path} {effect} and needs an admin key")
