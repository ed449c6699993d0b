"""Reads one tool call, a JSON object with a name and arguments, while it is being written."""

from __future__ import annotations

import enum
import json

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")


class _At(enum.Enum):
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()


class _Balance:
    """Follows brackets and strings through a JSON value."""

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
    """A pushdown scanner over `{"name": ..., "arguments": {...}}`, after the first brace.

    Attributes:
        name: of the function, once it is known.
        arguments: their text, as far as it was read and not taken.
        is_done: the last brace was read.
        is_broken: this is no such object, from the first character that was not taken on.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self.is_done = False
        self.is_broken = False
        self._at = _At.KEY
        self._key = ""
        self._has_arguments = False
        self._token: list[str] = []
        self._balance = _Balance()

    def feed(self, text: str) -> int:
        """Read on; returns how many characters were taken, fewer than all where the object ends or breaks."""
        for position, character in enumerate(text):
            if self.is_done:
                return position
            self._add(character)
            if self.is_broken:
                return position
        return len(text)

    def take_arguments(self) -> str:
        """What is new of the arguments."""
        taken, self.arguments = self.arguments, ""
        return taken

    def _add(self, character: str) -> None:
        match self._at:
            case _At.KEY:
                self._before_key(character)
            case _At.IN_KEY:
                self._in_key(character)
            case _At.COLON:
                self._before_value(character)
            case _At.VALUE:
                if not character.isspace():
                    self._start_value(character)
            case _At.IN_VALUE:
                self._in_value(character)

    def _before_key(self, character: str) -> None:
        if character == "}":
            self.is_done = True
            self.is_broken = self.name is None
            if not self._has_arguments:
                self.arguments = "{}"
        elif character == '"':
            self._start(_At.IN_KEY)
        elif not character.isspace() and character != ",":
            self.is_broken = True

    def _in_key(self, character: str) -> None:
        if character == '"':
            self._key = "".join(self._token)
            self._at = _At.COLON
        else:
            self._token.append(character)

    def _before_value(self, character: str) -> None:
        if character == ":":
            self._at = _At.VALUE
        elif not character.isspace():
            self.is_broken = True

    def _start(self, at: _At) -> None:
        self._at = at
        self._token = []
        self._balance = _Balance()

    def _start_value(self, character: str) -> None:
        self._start(_At.IN_VALUE)
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        is_number_or_word = self._balance.depth == 0 and not self._balance.in_string
        if is_number_or_word and self._token and (character in ",}" or character.isspace()):
            self._end_value()
            self._before_key(character)
            return
        self._token.append(character)
        self._balance.add(character)
        if self._is_arguments() and self._token[0] == "{":
            self.arguments += character
        if self._balance.depth < 0:
            self.is_broken = True
        elif character in '}]"' and self._balance.depth == 0 and not self._balance.in_string:
            self._end_value()

    def _end_value(self) -> None:
        self._at = _At.KEY
        if self._key in NAME_KEYS:
            self.name = self._string()
            self.is_broken = self.name is None
        elif self._is_arguments() and self._token[0] in '{"':
            self._has_arguments = True
            if self._token[0] == '"':
                self.arguments = self._string() or "{}"

    def _is_arguments(self) -> bool:
        return self._key in ARGUMENT_KEYS and not self._has_arguments

    def _string(self) -> str | None:
        """The value just read, if it is a string."""
        try:
            value = json.loads("".join(self._token))
        except ValueError:
            return None
        return value if isinstance(value, str) and value else None
