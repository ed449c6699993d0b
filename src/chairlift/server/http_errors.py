"""What is wrong with a call that got to no endpoint, in a sentence: frameworks say "Not Found"."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

LONGEST_PATH: Final = 80
"""Characters of a path that are compared with others, and shown."""
LIKENESS: Final = 0.8


def sentence(request: Request, error: HTTPException) -> str:
    """The error's own words, unless it has none. `app.state.paths` are those that there are."""
    detail, path = str(error.detail), request.url.path[:LONGEST_PATH]
    if error.status_code == 404 and detail == HTTPStatus.NOT_FOUND.phrase:
        return _unknown_path(path, request.app.state.paths)
    if error.status_code == 405:
        return f"{path} takes {(error.headers or {}).get('Allow', 'other methods')}, not {request.method}"
    if error.status_code == 400 and isinstance(error.__cause__, UnicodeDecodeError):
        return f"the body is not valid JSON: it is not UTF-8 ({error.__cause__.reason})"
    return detail


def _unknown_path(path: str, known: Iterable[str]) -> str:
    close = get_close_matches(path, known, 1, LIKENESS)
    hint = f"did you mean {close[0]}?" if close else "/openapi.json lists what there is."
    if close and close[0] == f"/v1{path}":
        hint += " The base URL of a client ends in /v1."
    return f"there is no {path} here: {hint}"
