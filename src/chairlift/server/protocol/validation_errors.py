"""Converts the validation errors of pydantic to messages that refer to the request body.

pydantic reports an error for every alternative of a union, at a path that contains the names of classes. A message has
the path in the body instead, and covers only the errors that are deepest in the body. The `type` or `role` of an object
must select its alternative.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from typing import Any, Final

from pydantic_core import ErrorDetails

from chairlift.options import foreign_advice
from chairlift.server.protocol.base import KNOWN_FIELDS, RequestBody

Path = tuple[str | int, ...]

MIN_SIMILARITY: Final = 0.74  # of an unknown field to the suggested one, as in difflib
MAX_NAME_LENGTH: Final = 100  # in characters, of the name of a field in a message
TAG_FIELDS: Final = ("type", "role")
"""Fields that select one of several forms of an object."""

MEDIA: Final = re.compile("(input_)?(audio|document|file|image|video)(_url)?")
"""The types of parts of a message that are no text."""

ENDPOINTS: Final = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses and /v1/embeddings",
}
"""Field -> the endpoints that require it."""

PREDICATES: Final = {
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "missing": "is required",
    "union_tag_not_found": "is required",
    "extra_forbidden": "is unknown or not supported: leave it out",
    "none_required": "is not supported: leave it out",
}
"""Type of a pydantic error -> the predicate of its message."""


def validation_problem(kind: type[RequestBody], problems: Sequence[ErrorDetails], body: Any) -> tuple[str, str]:
    """The error message for the first invalid field of a body, and the name of the field, from errors of pydantic."""
    field = problems[0]["loc"][:1]
    errors = [(_path(problem, body), problem) for problem in problems if problem["loc"][:1] == field]
    name, (path, first) = _format_path(field), errors[0]
    if first["type"] == "missing" and len(first["loc"]) == 1 and name in ENDPOINTS and isinstance(body, dict):
        for other, endpoints in ENDPOINTS.items():
            if other in body and other not in kind.model_fields:
                return f"{name} is required, got {other}, which is a field of {endpoints}: send it there", name
    if first["type"] == "extra_forbidden" and (meant := _suggestion(kind, path, body)):
        return f"{_format_path(path)} is unknown: {meant}", name
    if too_long := [error for error in errors if error[1]["type"] == "too_long"]:
        # The value has this form, because its entries up to the limit are valid: other forms are not reported.
        return _sentences(too_long[:1]) + _advice(kind, too_long[0][1]), name
    length = max(len(path) for path, _ in errors)
    deepest = [error for error in errors if len(error[0]) == length]
    # An object of another type or role also lacks fields.
    tags = [error for error in deepest if error[1]["type"] == "literal_error" and error[0][-1] in TAG_FIELDS]
    return _sentences(tags or deepest) + _advice(kind, problems[0]), name


def _advice(kind: type[RequestBody], problem: ErrorDetails) -> str:
    """The description of a field that is not supported, or only one of its values, unless it says only that."""
    field = kind.model_fields.get(str(problem["loc"][0])) if len(problem["loc"]) in (1, 2) else None
    if field is None or not field.description:
        return ""
    if _permits_nothing(problem):
        return "" if field.description.endswith(" not supported.") else f". {field.description}"
    has_one_value = problem["type"] == "literal_error" and " or " not in problem["ctx"]["expected"]
    return f". {field.description}" if has_one_value else ""


def _permits_nothing(problem: ErrorDetails) -> bool:
    """Whether the field may only be null or empty."""
    is_empty = problem["type"] == "too_long" and problem["ctx"]["max_length"] == 0
    return is_empty or problem["type"] == "none_required"


def _path(problem: ErrorDetails, body: Any) -> Path:
    """The path of the invalid field in the body."""
    found = _walk(body, problem["loc"], problem)
    path = problem["loc"] if found is None else found
    if problem["type"].startswith("union_tag"):
        named = problem["ctx"]["discriminator"].strip("'")
        return (*path, named if named in TAG_FIELDS else "type")
    return path


def _walk(value: Any, loc: Path, problem: ErrorDetails) -> Path | None:
    """The parts of `loc` that are keys and indices of the body; the other parts name alternatives of unions."""
    if not loc:
        return () if value is problem["input"] or value == problem["input"] else None
    head, *rest = loc
    if not rest and problem["type"] == "missing" and value == problem["input"]:
        return (head,)
    if isinstance(value, list):
        is_there = isinstance(head, int) and head < len(value)
    else:
        is_there = isinstance(value, dict) and head in value
    if is_there and (found := _walk(value[head], tuple(rest), problem)) is not None:
        return (head, *found)
    return _walk(value, tuple(rest), problem) if isinstance(head, str) else None


def _suggestion(kind: type[RequestBody], path: Path, body: Any) -> str | None:
    """What to do about an unknown field: advice, or the field that is probably meant, of the body or of objects that
    have most other fields."""
    parent, name = reduce(getitem, path[:-1], body), path[-1]
    if not isinstance(parent, dict) or not isinstance(name, str):
        return None
    if len(path) == 1 and kind.own_names.get(name, "").partition(".")[0] in kind.model_fields:
        return f"did you mean {kind.own_names[name]}?"
    is_field_name = len(path) == 1 and name.isidentifier()
    if is_field_name and (advice := foreign_advice(name, kind.model_fields, kind.own_names)):
        return advice
    num_known = [sum(key in fields for key in parent) for fields in KNOWN_FIELDS]
    kinds = (fields for fields, count in zip(KNOWN_FIELDS, num_known, strict=True) if count == max(num_known))
    known = frozenset().union(*kinds) if path[:-1] else frozenset(kind.model_fields)
    opposite = name.replace("max", "min")  # A limit is never meant by the other one.
    close = get_close_matches(name[:MAX_NAME_LENGTH], known - parent.keys() - {opposite}, 1, MIN_SIMILARITY)
    return f"did you mean {close[0]}?" if close else None


def _sentences(errors: list[tuple[Path, ErrorDetails]]) -> str:
    """Join errors of different fields with `;`, and of the same field with `or`."""
    expected: dict[Path, dict[str, ErrorDetails]] = {}
    for path, problem in errors:
        expected.setdefault(path, {})[_expectation(problem)] = problem
    return "; ".join(_sentence(path, [*texts], [*texts.values()][-1]) for path, texts in expected.items())


def _sentence(path: Path, expected: list[str], problem: ErrorDetails) -> str:
    text = f"{_format_path(path)} {' or '.join(expected)}".replace(" or must be ", " or ")
    if _permits_nothing(problem) or problem["type"] in ("missing", "extra_forbidden", "union_tag_not_found"):
        return text
    if problem["type"] == "too_long":
        return f"{text}, got {len(problem['input'])}"
    got = problem["ctx"]["tag"] if problem["type"] == "union_tag_invalid" else problem["input"]
    # A string has single quotes, which need no escapes in the error response.
    shown = repr(got) if isinstance(got, str) else printable(json.dumps(got, ensure_ascii=False, default=repr))
    is_media = path[-1:] == ("type",) and isinstance(got, str) and MEDIA.fullmatch(got) is not None
    return f"{text}, got {shown:.80}" + (": this server reads text only; leave this part out" if is_media else "")


def _expectation(problem: ErrorDetails) -> str:
    """What the field must be, as the predicate of a sentence."""
    kind, context = "none_required" if _permits_nothing(problem) else problem["type"], problem.get("ctx", {})
    if kind in PREDICATES:
        return PREDICATES[kind]
    if kind == "union_tag_invalid":
        tags, hosted, _end = context["expected_tags"].partition(", 'hosted'")
        return f"must be {tags} or the type of a hosted tool" if hosted else f"must be one of {tags}"
    if kind == "literal_error":
        expected = context["expected"]
        return f"must be {expected.lower() if expected in ('True', 'False') else expected}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    if kind.endswith(("too_short", "too_long")):
        bound, limit = ("at least", "min_length") if kind.endswith("short") else ("at most", "max_length")
        units = ("character", "characters") if kind.startswith("string") else ("entry", "entries")
        return f"must have {bound} {context[limit]} {units[context[limit] != 1]}"
    message = printable(problem["msg"]).removeprefix("Value error, ").replace("Input should", "must", 1)
    return message if message.startswith("must ") else f"is invalid: {message}"


def _format_path(path: Path) -> str:
    """The path in the form `messages[0].content`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{printable(_shortened(part))}" for part in path)
    return "".join(parts).removeprefix(".") or "body"


def _shortened(name: str) -> str:
    """The name of a field without its end, if the client chose a very long one."""
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[:MAX_NAME_LENGTH]}..."


def printable(text: str) -> str:
    """The text with a question mark for each unpaired surrogate, which JSON can contain and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
