"""What an answer has to look like: a JSON schema, a regular expression, a list of choices or a grammar."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from chairlift.errors import RequestError

MAX_SCHEMA_BYTES: Final = 128 * 1024
MAX_SCHEMA_DEPTH: Final = 64
MAX_REGEX_BYTES: Final = 16 * 1024
MAX_GRAMMAR_BYTES: Final = 64 * 1024
MAX_CHOICES: Final = 1024
MAX_CHOICES_BYTES: Final = 64 * 1024

KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
"""Of these exactly one is given."""

WHITESPACE: Final = ("disable_any_whitespace", "whitespace_pattern")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What stands around the thoughts that an answer may begin with.

    Attributes:
        is_inside: the prompt has begun them, so the answer ends them; else it may do without.
    """

    opening: str
    closing: str
    is_inside: bool = False


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A constraint on the text of an answer; field names are vLLM's. Equal constraints are equal, and hash alike.

    Attributes:
        json: a JSON schema, as an object or as its text; kept as text.
        regex: a regular expression in the syntax of Rust's regex crate, with ASCII's \\d, \\w and \\s and without
            look-around; the whole answer matches it.
        choice: the answer is one of these strings.
        grammar: in llguidance's dialect of Lark, beginning with `start`; or in GBNF (`root ::= ...`).
        json_object: any JSON object.
        disable_any_whitespace: of JSON: none between the tokens of it, where by default one space may follow a colon
            or a comma.
        whitespace_pattern: of JSON: what may stand between the tokens of it instead, as a regular expression.
        reasoning: the answer may think first, as it likes; the constraint holds behind that, from the first character
            that is no new line. None: it holds from the beginning.

    Raises:
        RequestError: naming the field, the value and the limit.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, f"must be true or false, got {getattr(self, name)!r}")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = f"got {' and '.join(given)}" if given else "got none"
            raise RequestError(
                f"structured_outputs must hold exactly one of {', '.join(KINDS)}: {what}", "structured_outputs"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name, limit in (("regex", MAX_REGEX_BYTES), ("grammar", MAX_GRAMMAR_BYTES)):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name), limit)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        self._check_whitespace(given[0])
        if self.reasoning is not None and not isinstance(self.reasoning, Reasoning):
            _refuse("reasoning", f"must be a Reasoning record, got {self.reasoning!r:.100}")

    @property
    def kind(self) -> str:
        """The field that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def _check_whitespace(self, kind: str) -> None:
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern, MAX_REGEX_BYTES)
            if self.disable_any_whitespace:
                _refuse("whitespace_pattern", "contradicts disable_any_whitespace: give one of them")
        for name in WHITESPACE:
            if getattr(self, name) and kind not in ("json", "json_object"):
                _refuse(name, f"has no effect on {kind}: it is for json and json_object. Leave it out.")


def _refuse(name: str, why: str) -> NoReturn:
    raise RequestError(f"structured_outputs.{name} {why}", f"structured_outputs.{name}")


def _check_text(name: str, value: Any, max_bytes: int) -> None:
    if not isinstance(value, str) or not value:
        _refuse(name, f"must be a text that is not empty, got {value!r:.100}")
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        _refuse(name, f"is not valid Unicode text: {error.reason}")
    if num_bytes > max_bytes:
        _refuse(name, f"is {num_bytes} bytes long, but at most {max_bytes} are allowed. Shorten it.")


def _schema_text(schema: Any) -> str:
    """The schema as JSON text; texts of the same object are equal."""
    if isinstance(schema, str):
        _check_text("json", schema, MAX_SCHEMA_BYTES)
        _check_depth(schema)
        try:
            schema = json_module.loads(schema, parse_constant=_no_constant)
        except ValueError as error:
            _refuse("json", f"is not JSON: {error}")
    if not isinstance(schema, Mapping):
        _refuse("json", f"must be a schema, as an object or as its text, got {schema!r:.100}")
    try:
        text = json_module.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        _refuse("json", f"is not JSON: {error}")
    except RecursionError:
        _refuse("json", f"is nested deeper than {MAX_SCHEMA_DEPTH}. Flatten it, or use $ref and $defs.")
    _check_text("json", text, MAX_SCHEMA_BYTES)
    _check_depth(text)
    return text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= MAX_SCHEMA_DEPTH:
        return
    depth = max(_depths(text), default=0)
    if depth > MAX_SCHEMA_DEPTH:
        _refuse("json", f"is nested {depth} deep, but at most {MAX_SCHEMA_DEPTH} is allowed. Use $ref and $defs.")


def _depths(text: str) -> Iterator[int]:
    """How many brackets are open at each one that opens, without parsing: a parser could be the victim."""
    depth, in_string, escaped = 0, False, False
    for character in text:
        if in_string:
            in_string, escaped = character != '"' or escaped, character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            yield depth
        elif character in "]}":
            depth -= 1


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        _refuse("choice", f"must be a list of at least one string, got {value!r:.100}")
    if len(value) > MAX_CHOICES:
        _refuse("choice", f"holds {len(value)} strings, but at most {MAX_CHOICES} are allowed")
    for choice in value:
        _check_text("choice", choice, MAX_CHOICES_BYTES)
    num_bytes = sum(len(choice.encode()) for choice in value)
    if num_bytes > MAX_CHOICES_BYTES:
        _refuse("choice", f"is {num_bytes} bytes long in all, but at most {MAX_CHOICES_BYTES} are allowed")
    return tuple(value)
