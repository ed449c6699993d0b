"""Scanners that read one tool call while it is generated: their base, and that of calls in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

ARGUMENT_KEYS = ("arguments", "parameters")


class CallScanner:
    """The base of pushdown scanners of one tool call, which are fed with its text while it is generated.

    Attributes:
        name: the name of the function; None until it is known.
        is_done: the end of the call was read.
        is_broken: the text is not a call. The character that shows it is not consumed.
    """

    _read: Callable[[str], None]
    """Reads one character in the present state."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._arguments = ""

    def feed(self, text: str) -> int:
        """Read text and return the number of consumed characters; fewer than all if the call ends or breaks."""
        for position, character in enumerate(text):
            if self.is_done:
                return position
            self._read(character)
            if self.is_broken:
                return position
        return len(text)

    def take_arguments(self) -> str:
        """Return the JSON of the arguments that was read since the last call."""
        taken, self._arguments = self._arguments, ""
        return taken


class JsonCallScanner(CallScanner):
    """Reads `{"name": ..., "arguments": {...}}` after the first brace. The text of the arguments is not changed.

    Name and arguments may also be in an object `function`, as in OpenAI's API.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_arguments = False
        self._read = self._before_key
        self._key = ""
        self._num_wrappers = 0
        self._start_token()

    def _before_key(self, character: str) -> None:
        if character == "}" and self._num_wrappers:
            self._num_wrappers -= 1
        elif character == "}":
            self.is_done = True
            self.is_broken = self.name is None
            if not self._has_arguments:
                self._arguments = "{}"
        elif character == '"':
            self._start_token()
            self._read = self._in_key
        elif not character.isspace() and character != ",":
            self.is_broken = True

    def _in_key(self, character: str) -> None:
        if character == '"':
            self._key = "".join(self._token)
            self._read = self._before_colon
        else:
            self._token.append(character)

    def _before_colon(self, character: str) -> None:
        if character == ":":
            self._read = self._before_value
        else:
            self.is_broken = not character.isspace()

    def _before_value(self, character: str) -> None:
        if character == "{" and self._key == "function" and self.name is None:
            self._num_wrappers += 1
            self._read = self._before_key
        elif not character.isspace():
            self._start_token()
            self._read = self._in_value
            self._in_value(character)

    def _in_value(self, character: str) -> None:
        is_number_or_word = self._depth == 0 and not self._in_string
        if is_number_or_word and self._token and (character in ",}" or character.isspace()):
            self._end_value()
            self._before_key(character)
            return
        self._token.append(character)
        self._count_brackets(character)
        if self._is_arguments() and self._token[0] == "{":
            self._arguments += character
        if self._depth < 0:
            self.is_broken = True
        elif character in '}]"' and self._depth == 0 and not self._in_string:
            self._end_value()

    def _start_token(self) -> None:
        self._token: list[str] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def _count_brackets(self, character: str) -> None:
        """Count the open brackets of a value, outside of its strings."""
        if self._in_string:
            self._in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _end_value(self) -> None:
        self._read = self._before_key
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
