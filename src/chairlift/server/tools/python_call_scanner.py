"""Reads one tool call in the form of Python, `name(key=value, ...)`, and converts its arguments to JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Final

NAME: Final = re.compile(r"[A-Za-z_][\w.-]{0,127}")
KEY: Final = re.compile(r"[A-Za-z_]\w*")
CONSTANTS: Final = {"None": "null", "True": "true", "False": "false", "null": "null", "true": "true", "false": "false"}
ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}
HEX_ESCAPES: Final = {"x": 2, "u": 4, "U": 8}
CLOSINGS: Final = {"[": "]", "(": ")", "{": "}"}


class PythonCallScanner:
    """A pushdown scanner with the interface of `CallScanner`. Values are literals: strings, numbers, lists, tuples,
    dictionaries with strings as keys, and the constants of Python or JSON.

    Attributes:
        name: the name of the function; None until its first argument or the end of the call shows that it is a call.
        is_done: the last parenthesis was read.
        is_broken: the text is not such a call. The character that shows it is not consumed.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._arguments = ""
        self._read: Callable[[str], None] = self._in_name
        self._token = ""
        self._function = ""
        self._num_keys = 0
        self._closings: list[str] = []
        self._separator = ""
        self._quote = ""
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
        if character == "(" and self._token:
            self._function, self._token = self._token, ""
            self._read = self._before_key
        else:
            self._extend_token(character, NAME)

    def _before_key(self, character: str) -> None:
        if character == ")":
            self._end_call()
        elif not character.isspace():
            self._token = ""
            self._read = self._in_key
            self._in_key(character)

    def _in_key(self, character: str) -> None:
        if character == "=" or character.isspace():
            self._read = self._before_equals
            self._before_equals(character)
        else:
            self._extend_token(character, KEY)

    def _before_equals(self, character: str) -> None:
        if character == "=" and self._token:
            self.name = self._function
            self._arguments += f"{', ' if self._num_keys else '{'}{json.dumps(self._token)}: "
            self._num_keys += 1
            self._read = self._before_value
        else:
            self.is_broken = not character.isspace()

    def _extend_token(self, character: str, pattern: re.Pattern[str]) -> None:
        self.is_broken = pattern.fullmatch(self._token + character) is None
        if not self.is_broken:
            self._token += character

    def _before_value(self, character: str) -> None:
        """Read the first character of a value or of a key of a dictionary, or the end of the brackets around it."""
        if character.isspace():
            return
        if self._closings and character == self._closings[-1]:
            self._close_bracket(character)
            return
        self._is_key = self._separator != ": " and self._closings[-1:] == ["}"]
        if character in "'\"":
            self._quote, self._token = character, ""
            self._write('"')
            self._read = self._in_string
        elif self._is_key:
            self.is_broken = True
        elif character in CLOSINGS:
            self._write("[" if character == "(" else character)
            self._closings.append(CLOSINGS[character])
        else:
            self._token = ""
            self._read = self._in_word
            self._in_word(character)

    def _write(self, text: str) -> None:
        self._arguments += self._separator + text
        self._separator = ""

    def _in_string(self, character: str) -> None:
        if self._token:
            self._in_escape(character)
        elif character == self._quote:
            self._arguments += '"'
            self._read = self._after_value
        elif character == "\\":
            self._token = character
        else:
            self._write_character(character)

    def _in_escape(self, character: str) -> None:
        self._token += character
        kind, digits = self._token[1], self._token[2:]
        if kind not in HEX_ESCAPES:
            self._write_character(ESCAPES.get(kind, self._token))
            self._token = ""
        elif digits and digits[-1] not in "0123456789abcdefABCDEF":
            self.is_broken = True
        elif len(digits) == HEX_ESCAPES[kind]:
            code, self._token = int(digits, 16), ""
            is_character = code < 0x110000 and not 0xD800 <= code < 0xE000
            self._write_character(chr(code) if is_character else "\N{REPLACEMENT CHARACTER}")

    def _write_character(self, text: str) -> None:
        self._arguments += json.dumps(text, ensure_ascii=False)[1:-1]

    def _in_word(self, character: str) -> None:
        if character.isalnum() or character in "_.+-":
            self._token += character
        elif (value := literal(self._token)) is None:
            self.is_broken = True
        else:
            self._write(value)
            self._after_value(character)

    def _after_value(self, character: str) -> None:
        self._read = self._after_value
        if character.isspace():
            return
        if not self._closings:
            self._after_argument(character)
        elif self._is_key:
            self.is_broken = character != ":"
            self._separator, self._is_key = ": ", False
            self._read = self._before_value
        elif character == ",":
            self._separator = ", "
            self._read = self._before_value
        elif character == self._closings[-1]:
            self._close_bracket(character)
        else:
            self.is_broken = True

    def _after_argument(self, character: str) -> None:
        if character == ")":
            self._end_call()
        else:
            self.is_broken = character != ","
            self._read = self._before_key

    def _close_bracket(self, character: str) -> None:
        self.is_broken = self._separator == ": "
        self._separator = ""
        self._arguments += "}" if character == "}" else "]"
        self._closings.pop()
        self._is_key = False
        self._read = self._after_value

    def _end_call(self) -> None:
        self.name = self._function
        self.is_done = True
        self._arguments += "}" if self._num_keys else "{}"


def literal(word: str) -> str | None:
    """The JSON of a constant or a number; None if the word is neither."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    for convert in (int, float):
        try:
            number = convert(word)
        except ValueError:
            continue
        return json.dumps(number) if math.isfinite(number) else None
    return None
