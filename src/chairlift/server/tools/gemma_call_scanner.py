"""Reads one tool call in the form of Gemma 4, `call:name{key:value,...}`, and converts its arguments to JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from chairlift.server.tools.python_call_scanner import literal

PREFIX: Final = "call:"
NAME: Final = re.compile(r"[A-Za-z_][\w.-]{0,127}")
QUOTE: Final = '<|"|>'
CLOSINGS: Final = {"[": "]", "{": "}"}


class GemmaCallScanner:
    """A pushdown scanner with the interface of `CallScanner`. Strings are between two `QUOTE` without escapes, keys are
    bare words or strings, and other values are objects, lists, numbers, constants and bare words, which become strings.

    Attributes:
        name: the name of the function; None until the first brace.
        is_done: the last brace was read.
        is_broken: the text is not such a call. The character that shows it is not consumed.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._arguments = ""
        self._read: Callable[[str], None] = self._in_name
        self._token = ""
        self._closings: list[str] = []
        self._separator = ""
        self._is_key = False

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
        """Return the JSON of the arguments that was converted since the last call."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _in_name(self, character: str) -> None:
        name = self._token.removeprefix(PREFIX)
        if character == "{" and name != self._token and name:
            self.name = name
            self._open(character)
            return
        token = self._token + character
        self.is_broken = not (PREFIX.startswith(token) or NAME.fullmatch(token.removeprefix(PREFIX)))
        self._token = token

    def _open(self, bracket: str) -> None:
        self._write(bracket)
        self._closings.append(CLOSINGS[bracket])
        self._begin_entry()

    def _begin_entry(self) -> None:
        """Expect a key of an object, an entry of a list, or the closing bracket."""
        self._is_key = self._closings[-1] == "}"
        self._read = self._before_token

    def _before_token(self, character: str) -> None:
        if character.isspace():
            return
        if character == self._closings[-1] and (self._is_key or character == "]"):
            self._close(character)
        elif character == QUOTE[0]:
            self._token, self._read = character, self._in_opening_quote
        elif character in CLOSINGS and not self._is_key:
            self._open(character)
        else:
            self._token, self._read = "", self._in_word
            self._in_word(character)

    def _in_opening_quote(self, character: str) -> None:
        self._token += character
        self.is_broken = not QUOTE.startswith(self._token)
        if self._token == QUOTE:
            self._write('"')
            self._token, self._read = "", self._in_string

    def _in_string(self, character: str) -> None:
        """Write the string but for characters that may begin the closing quote."""
        self._token += character
        if self._token == QUOTE:
            self._arguments += '"'
            self._read = self._after_token
            return
        while not QUOTE.startswith(self._token):
            self._arguments += json.dumps(self._token[0], ensure_ascii=False)[1:-1]
            self._token = self._token[1:]

    def _in_word(self, character: str) -> None:
        if character not in ",:{}[]" and not character.isspace():
            self._token += character
        elif not self._token:
            self.is_broken = True
        else:
            value = None if self._is_key else literal(self._token)
            self._write(json.dumps(self._token) if value is None else value)
            self._after_token(character)

    def _write(self, text: str) -> None:
        self._arguments += self._separator + text
        self._separator = ""

    def _after_token(self, character: str) -> None:
        self._read = self._after_token
        if character.isspace():
            return
        if self._is_key:
            self.is_broken = character != ":"
            self._separator, self._is_key, self._read = ": ", False, self._before_token
        elif character == ",":
            self._separator = ", "
            self._begin_entry()
        elif character == self._closings[-1]:
            self._close(character)
        else:
            self.is_broken = True

    def _close(self, bracket: str) -> None:
        self._separator = ""
        self._arguments += bracket
        self._closings.pop()
        self.is_done = not self._closings
        self._is_key, self._read = False, self._after_token
