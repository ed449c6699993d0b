"""Reads one tool call, a JSON object with a name and arguments, while it is generated."""

from __future__ import annotations

import enum
import json

ARGUMENT_KEYS = ("arguments", "parameters")


class _ScannerState(enum.Enum):
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()


class _BracketCounter:
    """Counts the open brackets of a JSON value, outside of its strings."""

    __slots__ = ("_escaped", "depth", "in_string")

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def add(self, character: str) -> None:
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self.in_string = False
        elif character == '"':
            self.in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1


class CallScanner:
    """A pushdown scanner for `{"name": ..., "arguments": {...}}`, fed with the text after the first brace.

    Attributes:
        name: the name of the function; None until it is known.
        is_done: the last brace was read.
        is_broken: the text is not such an object. The character that shows it is not consumed.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._arguments = ""
        self._state = _ScannerState.KEY
        self._key = ""
        self._has_arguments = False
        self._token: list[str] = []
        self._brackets = _BracketCounter()

    def feed(self, text: str) -> int:
        """Read text and return the number of consumed characters; fewer than all if the object ends or breaks."""
        for position, character in enumerate(text):
            if self.is_done:
                return position
            self._add(character)
            if self.is_broken:
                return position
        return len(text)

    def take_arguments(self) -> str:
        """Return the text of the arguments that was read since the last call."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _add(self, character: str) -> None:
        match self._state:
            case _ScannerState.KEY:
                self._before_key(character)
            case _ScannerState.IN_KEY if character == '"':
                self._key = "".join(self._token)
                self._state = _ScannerState.COLON
            case _ScannerState.IN_KEY:
                self._token.append(character)
            case _ScannerState.COLON if character == ":":
                self._state = _ScannerState.VALUE
            case _ScannerState.COLON:
                self.is_broken = not character.isspace()
            case _ScannerState.VALUE if not character.isspace():
                self._start_token(_ScannerState.IN_VALUE)
                self._in_value(character)
            case _ScannerState.IN_VALUE:
                self._in_value(character)

    def _before_key(self, character: str) -> None:
        if character == "}":
            self.is_done = True
            self.is_broken = self.name is None
            if not self._has_arguments:
                self._arguments = "{}"
        elif character == '"':
            self._start_token(_ScannerState.IN_KEY)
        elif not character.isspace() and character != ",":
            self.is_broken = True

    def _start_token(self, state: _ScannerState) -> None:
        self._state = state
        self._token = []
        self._brackets = _BracketCounter()

    def _in_value(self, character: str) -> None:
        is_number_or_word = self._brackets.depth == 0 and not self._brackets.in_string
        if is_number_or_word and self._token and (character in ",}" or character.isspace()):
            self._end_value()
            self._before_key(character)
            return
        self._token.append(character)
        self._brackets.add(character)
        if self._is_arguments() and self._token[0] == "{":
            self._arguments += character
        if self._brackets.depth < 0:
            self.is_broken = True
        elif character in '}]"' and self._brackets.depth == 0 and not self._brackets.in_string:
            self._end_value()

    def _end_value(self) -> None:
        self._state = _ScannerState.KEY
        if self._key == "name":
            self.name = self._string_token()
            self.is_broken = self.name is None
        elif self._is_arguments() and self._token[0] in '{"':
            self._has_arguments = True
            if self._token[0] == '"':
                self._arguments = self._string_token() or "{}"

    def _is_arguments(self) -> bool:
        return self._key in ARGUMENT_KEYS and not self._has_arguments

    def _string_token(self) -> str | None:
        """The value of the last token if it is a string that is not empty."""
        try:
            value = json.loads("".join(self._token))
        except ValueError:
            return None
        return value if isinstance(value, str) and value else None
