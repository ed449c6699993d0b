"""What is wrong with a body, in a sentence."""

from __future__ import annotations

from fastapi.exceptions import RequestValidationError


def describe(error: RequestValidationError) -> tuple[str, str | None]:
    """One sentence for each way in which the first wrong field is wrong, and its name."""
    problems: dict[str, list[str]] = {}
    for problem in error.errors():
        where = [_printable(str(part)) for part in problem["loc"][1:]]
        field = where[0] if where else "body"
        if problem["type"] == "json_invalid":
            return f"the body is not valid JSON: {problem['ctx']['error']}", None
        if not where and isinstance(problem["input"], bytes):
            return "the body is not taken for JSON: send it with `Content-Type: application/json`", None
        if problem["type"] == "extra_forbidden":
            sentence = "unknown or not supported here; leave it out"
        else:
            sentence = f"{_printable(problem['msg'])}, got {problem['input']!r:.80}"
        problems.setdefault(field, []).append(f"{'.'.join(where) or field}: {sentence}")
    return "; or ".join(next(iter(problems.values()))), next(iter(problems))


def _printable(text: str) -> str:
    """Half a surrogate pair, which JSON can hold and UTF-8 cannot, is shown as a question mark."""
    return text.encode("utf-8", "replace").decode()
