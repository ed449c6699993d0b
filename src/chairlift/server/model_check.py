"""Whether a request names the model that is served."""

from __future__ import annotations

from starlette.exceptions import HTTPException


class UnknownModelError(HTTPException):
    """A request for a model that is not served here."""


def check_model(requested: str | None, name: str) -> None:
    """Raises UnknownModelError unless a request names this model, or none."""
    if requested is not None and requested != name:
        raise UnknownModelError(404, f"model {requested!r:.100} is not served here; {name!r} is")
