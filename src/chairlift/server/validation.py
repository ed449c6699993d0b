"""What is wrong with a body, in a sentence."""

from __future__ import annotations

from typing import cast

from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails

from chairlift.server.protocol.mistakes import describe_mistakes


def describe(error: RequestValidationError) -> tuple[str, str | None]:
    """What is wrong with the first wrong field, and its name."""
    problems = cast("list[ErrorDetails]", error.errors())
    first = problems[0]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']}", None
    if first["loc"][1:] == () and isinstance(first["input"], bytes):
        return "the body is not taken for JSON: send it with `Content-Type: application/json`", None
    return describe_mistakes([{**problem, "loc": tuple(problem["loc"][1:])} for problem in problems], error.body)
