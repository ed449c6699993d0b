"""Constraints on the text of an answer: a JSON schema, a regular expression, a list of choices or a grammar."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NoReturn

from chairlift.checked_record import check_when_constructed
from chairlift.errors import RequestError

MAX_SCHEMA_BYTES: Final = 128 * 1024
MAX_SCHEMA_DEPTH: Final = 64
MAX_REGEX_BYTES: Final = 16 * 1024
MAX_GRAMMAR_BYTES: Final = 64 * 1024
MAX_CHOICES: Final = 1024
MAX_CHOICES_BYTES: Final = 64 * 1024

KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
"""The kinds of constraints. Exactly one of these fields must be set."""

WHITESPACE: Final = ("disable_any_whitespace", "whitespace_pattern")

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_DEPTH_CHANGES: Final = bytes(1 if byte in b"[{" else 255 for byte in range(256))


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The strings that open and close the reasoning at the beginning of an answer.

    Attributes:
        is_inside: the prompt ends with the opening string, so the answer must close the reasoning; if false, the
            answer may have no reasoning, unless `max_tokens` is set.
        label: the text after the opening string that is not part of the reasoning.
        max_tokens: the maximum number of tokens of the reasoning, after which only the closing string is allowed.
        answer: the string that may open the answer after it, and is not part of the answer.
        ends: further strings that end the reasoning.
    """

    opening: str
    closing: str
    is_inside: bool = False
    label: str = ""
    max_tokens: int | None = None
    answer: str = ""
    ends: tuple[str, ...] = ()


@check_when_constructed
@dataclass(frozen=True, slots=True, weakref_slot=True)
class StructuredOutputs:
    """A constraint on the text of an answer, with vLLM's field names. Equal constraints have equal hashes.

    Attributes:
        json: a JSON schema, as an object or as JSON text; stored as text.
        regex: a regular expression that the whole answer matches, in the syntax of Rust's regex crate with ASCII's \\d,
            \\w and \\s and without look-around.
        choice: the answer is one of these strings.
        grammar: a grammar in llguidance's dialect of Lark, beginning with `start`, or in GBNF (`root ::= ...`).
        json_object: the answer is any JSON object.
        disable_any_whitespace: JSON has no space between its tokens; by default a space may follow a colon or a comma.
        whitespace_pattern: a regular expression for the text between the tokens of JSON.
        reasoning: the answer may begin with free reasoning, and the constraint applies from the first character after
            it that is not a newline. None applies the constraint from the beginning.
        has_annotations: the keywords `uniqueItems` and `propertyNames`, and formats that no grammar follows, are left
            out of the schema, and named, as in `response_format`. Otherwise they are errors.
        calls: the Lark grammar of tool calls (`grammar_text.relax_calls`), which an answer may consist of instead.

    Raises:
        RequestError: a value is invalid; the message names the field, the value and the limit.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    reasoning: Reasoning | None = None
    has_annotations: bool = False
    calls: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):  # A decoded record has a list, which has no hash.
            object.__setattr__(self, "choice", tuple(self.choice))

    def check(self) -> None:
        """Check the fields, and write the schema in its normal form. The constructor calls it."""
        for name in ("json_object", "disable_any_whitespace", "has_annotations"):
            if not isinstance(getattr(self, name), bool):
                _reject(name, f"must be true or false, got {getattr(self, name)!r}")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1 and (given or self.calls is None):
            what = f"got {' and '.join(given)}" if given else "got none"
            raise RequestError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, {what}", "structured_outputs"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        limits = {"regex": MAX_REGEX_BYTES, "grammar": MAX_GRAMMAR_BYTES, "whitespace_pattern": MAX_REGEX_BYTES}
        for name, limit in limits.items():
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name), limit)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            _reject("whitespace_pattern", "cannot be combined with disable_any_whitespace: remove one of them")
        for name in WHITESPACE:
            if getattr(self, name) and self.kind not in ("json", "json_object"):
                _reject(name, f"needs json or json_object, got {self.kind}: remove {name}")
        if self.reasoning is not None and not isinstance(self.reasoning, Reasoning):
            _reject("reasoning", f"must be a Reasoning record, got {self.reasoning!r:.100}")

    @property
    def texts(self) -> list[str]:
        """The texts of the constraint."""
        texts = (self.json, self.regex, self.grammar, self.whitespace_pattern, self.calls, *(self.choice or ()))
        return [text for text in texts if isinstance(text, str)]

    @property
    def kind(self) -> str:
        """The name of the field that is set; `calls` if no other is."""
        return next((name for name in KINDS if getattr(self, name) not in (None, False)), "calls")


def _reject(name: str, reason: str) -> NoReturn:
    raise RequestError(f"structured_outputs.{name} {reason}", f"structured_outputs.{name}")


def _check_text(name: str, value: Any, max_bytes: int) -> None:
    if not isinstance(value, str) or not value:
        _reject(name, f"must be a string that is not empty, got {value!r:.100}")
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        _reject(name, f"is not valid Unicode text: {error.reason}")
    if num_bytes > max_bytes:
        _reject(name, f"must have at most {max_bytes} bytes, got {num_bytes}")


def _schema_text(schema: Any) -> str:
    """The schema as JSON text in a normal form, so that the texts of equal schemas are equal."""
    if isinstance(schema, str):
        _check_text("json", schema, MAX_SCHEMA_BYTES)
        _check_depth(schema)
        try:
            schema = json_module.loads(schema, parse_constant=_no_constant)
        except ValueError as error:
            _reject("json", f"is not JSON: {error}")
    if not isinstance(schema, Mapping):
        _reject("json", f"must be a JSON schema, as an object or as JSON text, got {schema!r:.100}")
    try:
        text = json_module.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        _reject("json", f"is not JSON: {error}")
    except RecursionError:
        _reject("json", f"must have at most {MAX_SCHEMA_DEPTH} levels. Use $ref and $defs.")
    _check_text("json", text, MAX_SCHEMA_BYTES)
    _check_depth(text)
    return text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _check_depth(text: str) -> None:
    if (depth := json_depth(text.encode())) > MAX_SCHEMA_DEPTH:
        _reject("json", f"must have at most {MAX_SCHEMA_DEPTH} levels, got {depth}. Use $ref and $defs.")


def json_depth(text: bytes) -> int:
    """The nesting depth of arrays and objects in a JSON text, without parsing it, because a parser may crash.

    For text that is not valid JSON it is at least the depth that a parser reaches before it fails.
    """
    brackets = _STRING.sub(b"", text).translate(None, _NOT_BRACKETS)
    signed = memoryview(brackets.translate(_DEPTH_CHANGES)).cast("b")
    return max(accumulate(signed, initial=0))


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        _reject("choice", f"must be a list of at least one string, got {value!r:.100}")
    if len(value) > MAX_CHOICES:
        _reject("choice", f"must have at most {MAX_CHOICES} strings, got {len(value)}")
    for choice in value:
        _check_text("choice", choice, MAX_CHOICES_BYTES)
    num_bytes = sum(len(choice.encode()) for choice in value)
    if num_bytes > MAX_CHOICES_BYTES:
        _reject("choice", f"must have at most {MAX_CHOICES_BYTES} bytes in total, got {num_bytes}")
    return tuple(value)
