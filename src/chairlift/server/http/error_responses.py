"""The error responses of the API: status, headers and message for each kind of error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any, Final, cast

from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request

from chairlift.errors import ChairliftError, DeadlineError, EngineDeadError, OverloadedError, RequestError
from chairlift.server.api.protocol.base import ErrorBody, ErrorInfo
from chairlift.server.api.protocol.validation_errors import describe_validation_errors

ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 503)
}
"""The error responses of endpoints that generate, for their OpenAPI description."""

MAX_PATH_CHARACTERS: Final = 80
"""Characters of a path that are compared with others, and shown."""
MIN_SIMILARITY: Final = 0.8


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error."""
    if isinstance(error, RequestError):
        info = ErrorInfo(message=str(error), type="invalid_request_error", param=error.param)
        return 400, ErrorBody(error=info)
    if isinstance(error, EngineDeadError):
        return 503, ErrorBody(error=ErrorInfo(message=str(error), type="service_unavailable_error"))
    if isinstance(error, OverloadedError):
        is_unavailable = error.code in ("shutting_down", "preparation_failed")
        status, kind = (503, "service_unavailable_error") if is_unavailable else (429, "rate_limit_error")
        return status, ErrorBody(error=ErrorInfo(message=str(error), type=kind, code=error.code))
    if isinstance(error, DeadlineError):
        info = ErrorInfo(message=str(error), type="timeout_error", param="timeout", code="deadline_exceeded")
        return 408, ErrorBody(error=info)
    message = str(error) if isinstance(error, ChairliftError) else "internal error"
    return 500, ErrorBody(error=ErrorInfo(message=message, type="internal_server_error"))


def error_headers(error: Exception) -> dict[str, str] | None:
    """Headers of an error: when to come back, or that this is of no use."""
    if isinstance(error, OverloadedError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return {"x-should-retry": "false"} if isinstance(error, DeadlineError) else None


def http_error_message(request: Request, error: HTTPException) -> str:
    """The error's own words, unless it has none. `app.state.paths` are those that there are."""
    detail, path = str(error.detail), request.url.path[:MAX_PATH_CHARACTERS]
    if error.status_code == 404 and detail == HTTPStatus.NOT_FOUND.phrase:
        return _unknown_path(path, request.app.state.paths)
    if error.status_code == 405:
        return f"{path} takes {(error.headers or {}).get('Allow', 'other methods')}, not {request.method}"
    if error.status_code == 400 and isinstance(error.__cause__, UnicodeDecodeError):
        return f"the body is not valid JSON: it is not UTF-8 ({error.__cause__.reason})"
    return detail


def _unknown_path(path: str, known: Iterable[str]) -> str:
    close = get_close_matches(path, known, 1, MIN_SIMILARITY)
    hint = f"did you mean {close[0]}?" if close else "/openapi.json lists what there is."
    if close and close[0] == f"/v1{path}":
        hint += " The base URL of a client ends in /v1."
    return f"there is no {path} here: {hint}"


def describe_validation_error(error: RequestValidationError) -> tuple[str, str | None]:
    """What is wrong with the first wrong field, and its name."""
    problems = cast("list[ErrorDetails]", error.errors())
    first = problems[0]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']}", None
    if first["loc"][1:] == () and isinstance(first["input"], bytes):
        return "the request body has no JSON content type: send `Content-Type: application/json`", None
    return describe_validation_errors(
        [{**problem, "loc": tuple(problem["loc"][1:])} for problem in problems], error.body
    )
