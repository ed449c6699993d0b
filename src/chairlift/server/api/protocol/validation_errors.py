"""What is wrong with a body, in the words of whoever wrote it.

pydantic tells of every alternative of a union, at a path that names classes. Here the path is that of the body, and
only those alternatives count that got furthest into it and are of the kind (`type`, `role`) that it says it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import ErrorDetails

Path = tuple[str | int, ...]

KINDS: Final = ("type", "role")
"""Fields that say which of several forms an object has."""

OBJECT: Final = "an object"
WORDS: Final = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": OBJECT,
    "model_type": OBJECT,
    "model_attributes_type": OBJECT,
}
"""Type of a problem -> what would have been right."""

JSON_WORDS: Final = {"False": "false", "True": "true"}
LENGTHS: Final = {
    "too_short": "at least",
    "too_long": "at most",
    "string_too_short": "at least",
    "string_too_long": "at most",
}


@dataclass(frozen=True, slots=True)
class _InvalidField:
    """`path`: of the field in the body; `form`: the alternative that it is not."""

    problem: ErrorDetails
    path: Path
    form: Path

    @property
    def is_other_form(self) -> bool:
        """The object says that it is of another form."""
        return self.problem["type"] == "literal_error" and self.path[-1] in KINDS


def describe_validation_errors(problems: Sequence[ErrorDetails], body: Any) -> tuple[str, str]:
    """What is wrong with the first wrong field of a body, and its name.

    Args:
        problems: as pydantic found them, each `loc` beginning in the body.
    """
    field = problems[0]["loc"][:1]
    mistakes = [_locate(problem, body) for problem in problems if problem["loc"][:1] == field]
    if too_long := [mistake for mistake in mistakes if mistake.problem["type"] == "too_long"]:
        # The value is of this form, because its entries up to the limit are valid: other forms do not matter.
        return _sentences([too_long[:1]]), printable(str(field[0]))
    deepest = max(len(mistake.path) for mistake in mistakes)
    forms: dict[Path, list[_InvalidField]] = {}
    for mistake in mistakes:
        if len(mistake.path) == deepest:
            forms.setdefault(mistake.form, []).append(mistake)
    meant = [form for form in forms.values() if not any(mistake.is_other_form for mistake in form)]
    if not meant:
        meant = [[mistake for mistake in form if mistake.is_other_form] for form in forms.values()]
    return _sentences(meant), printable(str(field[0])) if field else "body"


def _locate(problem: ErrorDetails, body: Any) -> _InvalidField:
    loc, kind = problem["loc"], problem["type"]
    found = _walk(body, loc, problem)
    path = loc if found is None else found
    if kind.startswith("union_tag"):
        named = problem["ctx"]["discriminator"].strip("'")
        return _InvalidField(problem, (*path, named if named in KINDS else "type"), loc)
    return _InvalidField(problem, path, loc[:-1])


def _walk(value: Any, loc: Path, problem: ErrorDetails) -> Path | None:
    """The parts of `loc` that lead through the body to what pydantic looked at; the others name alternatives."""
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


def _sentences(forms: list[list[_InvalidField]]) -> str:
    """Within a form all of it is wrong; one of the forms would do."""
    wanted: dict[Path, list[str]] = {}
    for mistake in (mistake for form in forms for mistake in form):
        words = wanted.setdefault(mistake.path, [])
        if (word := _wanted(mistake.problem)) not in words:
            words.append(word)
    last = {mistake.path: mistake.problem for form in forms for mistake in form}
    return "; ".join(_sentence(path, words, last[path]) for path, words in wanted.items())


def _sentence(path: Path, wanted: list[str], problem: ErrorDetails) -> str:
    text = f"{_written(path)}: {' or '.join(wanted)}".replace(" or must be ", " or ")
    if problem["type"] in ("missing", "extra_forbidden", "union_tag_not_found"):
        return text
    if problem["type"] == "too_long":
        return f"{text}, got {len(problem['input'])}"
    got = problem["ctx"]["tag"] if problem["type"] == "union_tag_invalid" else problem["input"]
    return f"{text}, got {_as_json(got):.80}"


def _as_json(value: Any) -> str:
    """A value as it stood in the body; texts in quotes that need no escapes in an error, which is JSON itself."""
    return repr(value) if isinstance(value, str) else printable(json.dumps(value, ensure_ascii=False, default=repr))


def _wanted(problem: ErrorDetails) -> str:
    kind, message = problem["type"], printable(problem["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return "unknown or not supported here; leave it out"
    if kind in ("missing", "union_tag_not_found"):
        return "is required"
    if kind == "union_tag_invalid":
        return f"must be one of {problem['ctx']['expected_tags']}"
    if kind == "none_required":
        return "is not supported here; leave it out"
    if kind == "literal_error":
        expected = problem["ctx"]["expected"]
        return f"must be {JSON_WORDS.get(expected, expected)}"
    if kind == "string_pattern_mismatch":
        return f"must match {problem['ctx']['pattern']}"
    if kind in LENGTHS:
        limit = problem["ctx"]["min_length" if kind.endswith("short") else "max_length"]
        units = ("character", "characters") if kind.startswith("string") else ("entry", "entries")
        return f"must have {LENGTHS[kind]} {limit} {units[limit != 1]}"
    return f"must be {WORDS[kind]}" if kind in WORDS else message.replace("Input should be", "must be", 1)


def _written(path: Path) -> str:
    """As one writes it: messages[0].content."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{printable(part)}" for part in path)
    return "".join(parts).removeprefix(".") or "body"


def printable(text: str) -> str:
    """Half a surrogate pair, which JSON can hold and UTF-8 cannot, is shown as a question mark."""
    return text.encode("utf-8", "replace").decode()
