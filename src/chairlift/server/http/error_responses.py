"""The error responses of the API: status, headers and message for each kind of error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from chairlift.errors import (
    ChairliftError,
    DeadlineError,
    EngineDeadError,
    OverloadedError,
    RequestError,
    UnknownItemError,
)
from chairlift.server.protocol.base import ErrorBody, ErrorInfo
from chairlift.server.protocol.messages import MessagesError

ErrorForm = type[ErrorBody] | type[MessagesError]
"""The type of the bodies of errors."""

MAX_PATH_CHARACTERS: Final = 80  # of an unknown path, which are compared with known paths, and shown in the error
MIN_SIMILARITY: Final = 0.8  # of a known path that is suggested, as in `difflib`


def route_path(scope: Scope) -> str:
    """The path of a request as the routes name it. uvicorn puts the prefix before the path that the proxy sent.

    A mounted application extends `root_path` by its own path, and keeps the prefix as `app_root_path`.
    """
    path: str = scope["path"]
    return path.removeprefix(scope.get("app_root_path", scope.get("root_path", "")))


def error_form(path: str) -> ErrorForm:
    """The form of the errors of a path: Anthropic's for /v1/messages and the paths below it, OpenAI's for others."""
    return MessagesError if f"{path}/".startswith("/v1/messages/") else ErrorBody


def error_response(scope: Scope, status: int, info: ErrorInfo, headers: Mapping[str, str] | None = None) -> Response:
    """The response with an error. Clients of Anthropic, which send `anthropic-version`, get its form at every path."""
    is_anthropic = any(name == b"anthropic-version" for name, _value in scope["headers"])
    form = MessagesError if is_anthropic else error_form(route_path(scope))
    return JSONResponse(form.of(status, info).model_dump(), status_code=status, headers=headers)


def error_models(*statuses: int, path: str = "") -> dict[int | str, dict[str, Any]]:
    """The description of errors of a path with these statuses, as the argument `responses` of a route. The first one
    names the model for all of them, because FastAPI builds a validator for each model."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_form(path).__name__}"}}}
    return {each: {"model": error_form(path)} if each == statuses[0] else {"content": content} for each in statuses}


def error_info(error: Exception, *, is_admin: bool = False) -> tuple[int, ErrorInfo]:
    """The HTTP status and the error for an exception. Only an admin may read paths of the server, which the reason of a
    failure contains."""
    if isinstance(error, RequestError):
        info = ErrorInfo(message=str(error), type="invalid_request_error", param=error.param, code=error.code)
        return 404 if isinstance(error, UnknownItemError) else 400, info
    if isinstance(error, DeadlineError):
        return 408, ErrorInfo(message=str(error), type="timeout_error", param="timeout", code="deadline_exceeded")
    if isinstance(error, EngineDeadError | OverloadedError):
        code: str | None = getattr(error, "code", None)
        is_unavailable = isinstance(error, EngineDeadError) or code == "shutting_down"
        status, kind = (503, "service_unavailable_error") if is_unavailable else (429, "rate_limit_error")
        return status, ErrorInfo(message=error.text(is_admin=is_admin), type=kind, code=code)
    message = str(error) if isinstance(error, ChairliftError) and is_admin else "internal error"
    return 500, ErrorInfo(message=message, type="internal_server_error")


def error_parts(
    request: Request, error: Exception, *, is_admin: bool
) -> tuple[int, ErrorInfo, Mapping[str, str] | None]:
    """The status, the error and the headers of the response to a request that an exception has ended.

    The headers say after how many seconds to retry, or that a retry is useless. For an unknown path, similar ones
    of `app.state.paths` are suggested.
    """
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):
        message, path = str(error.detail), route_path(request.scope)[:MAX_PATH_CHARACTERS]
        if error.status_code == 404 and message == HTTPStatus.NOT_FOUND.phrase:
            message = _unknown_path(path, request.app.state.paths)
        elif error.status_code == 405:
            message = f"{path} accepts {(error.headers or {}).get('Allow', 'other methods')}, not {request.method}"
        info = ErrorInfo(message=message, type="invalid_request_error", code=getattr(error, "code", None))
        return error.status_code, info, error.headers
    if isinstance(error, OverloadedError):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    elif isinstance(error, DeadlineError):
        headers = {"x-should-retry": "false"}
    return *error_info(error, is_admin=is_admin), headers


def _unknown_path(path: str, known: Iterable[str]) -> str:
    close = get_close_matches(path, known, 1, MIN_SIMILARITY)
    hint = f"did you mean {close[0]}?" if close else "/openapi.json lists all paths."
    if close and close[0] == f"/v1{path}":
        hint += " The base URL of a client ends in /v1."
    if not close and path.startswith("/api/"):
        hint = "clients of Ollama can use the API of OpenAI, whose base URL ends in /v1"
    return f"the path {path} does not exist: {hint}"
