"""Scanners of calls whose arguments are literals of JSON or Gemma, which they convert to valid JSON."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

NAME: Final = re.compile(r"[A-Za-z_][\w.:-]{0,127}")
STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
CONSTANTS: Final = {"None": "null", "True": "true", "False": "false", "null": "null", "true": "true", "false": "false"}
PLAIN_ESCAPES: Final = "\\'\"/"
JSON_ESCAPES: Final = '\\"/bfnrt'
ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
NUMBER: Final = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
NAME_KEYS: Final = ("name", "tool_name")
ARGUMENT_KEYS: Final = ("arguments", "parameters")
HEX_ESCAPES: Final = {"x": 2, "u": 4, "U": 8}


class CallScanner:
    """The base of pushdown scanners of one tool call, which are fed with its text while it is generated.

    Attributes:
        name: the name of the function; None until it is known that its arguments follow.
        is_done: the end of the call was read.
        is_broken: the text is not a call. The character that shows it is not consumed.
        has_arguments: the beginning of the arguments was read.
    """

    _read: Callable[[str], None]
    """Reads one character in the present state."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self.has_arguments = False
        self._arguments = ""

    def feed(self, text: str) -> int:
        """Read text and return the number of consumed characters; fewer than all if the call ends or breaks."""
        for position, character in enumerate(text):
            if self.is_done or self.is_broken:
                return position
            self._read(character)
            if self.is_broken:
                return position
        return len(text)

    def take_arguments(self) -> str:
        """Return the JSON of the arguments that was read since the last call."""
        taken, self._arguments = self._arguments, ""
        return taken

    def finish(self, text: str) -> None:
        """Read text that was not consumed, because the answer breaks off."""


@dataclass(frozen=True, slots=True)
class LiteralSyntax:
    """How literals are written. Keys may be words without quotes, and a word that is no constant or number is a string.

    Attributes:
        quotes: the texts that open a string and close it again, with different first characters.
        word_character: the characters of numbers, constants and bare words.
        is_json: strings have escapes; white space and escapes are kept, so that arguments are spelled as in the answer.
    """

    quotes: tuple[str, ...]
    word_character: re.Pattern[str]
    is_json: bool = False


BRACKETS: Final = {"[": "]", "{": "}"}
GEMMA: Final = LiteralSyntax(('<|"|>',), re.compile(r"[^,:{}\[\]\s]"))
FUNCTION_GEMMA: Final = replace(GEMMA, quotes=("<escape>",))
WORD: Final = re.compile(r"""[^,:{}\[\]\s"']""")
JSON: Final = LiteralSyntax(("'", '"'), WORD, is_json=True)
"""JSON as models write it: also with constants of Python, words without quotes, and commas at the end of lists."""


class LiteralScanner(CallScanner):
    """Reads nested literals. A subclass reads what is around them."""

    def __init__(self, syntax: LiteralSyntax) -> None:
        super().__init__()
        self.syntax = syntax
        self._token = ""
        self._closings: list[str] = []
        self._separator = ""  # What is written before the next value: a comma or colon, and space.
        self._quote = self._escapes = ""
        self._surrogate = 0
        self._is_key = False

    def finish(self, text: str) -> None:
        """End a number or a constant at the end of the answer."""
        if self._read == self._in_word and literal(self._token) is not None:
            self.feed(" ")

    def _in_object(self) -> bool:
        return self._closings[-1] == "}"

    def _before_value(self, character: str) -> None:
        """Read the first character of a value or of a key of an object, or the end of the brackets around it."""
        if character.isspace():
            self._keep_space(character)
            return
        if character == self._closings[-1]:
            self._close_bracket(character)
            return
        self._is_key = ":" not in self._separator and self._in_object()
        quotes = [quote for quote in self.syntax.quotes if quote[0] == character]
        self._token = ""
        if quotes:
            self._quote, self._read = quotes[0], self._in_opening_quote
        elif character in BRACKETS and not self._is_key:
            self._open_bracket(character)
            return
        else:
            self._read = self._in_word
        self._read(character)

    def _open_bracket(self, bracket: str) -> None:
        self._write(bracket)
        self._closings.append(BRACKETS[bracket])
        self._read = self._before_value

    def _close_bracket(self, bracket: str) -> None:
        self.is_broken = ":" in self._separator
        if self.is_broken:
            return
        space = self._separator.replace(",", "") if self.syntax.is_json else ""
        self._separator = ""
        self._arguments += space + ("}" if self._in_object() else "]")
        self._closings.pop()
        self._is_key = False
        self._read = self._after_value

    def _keep_space(self, character: str) -> None:
        if self.syntax.is_json and character in " \t\r\n":
            self._separator += character

    def _write(self, text: str) -> None:
        self._arguments += self._separator + text
        self._separator = ""

    def _in_opening_quote(self, character: str) -> None:
        self._token += character
        self.is_broken = not self._quote.startswith(self._token)
        if self._token == self._quote:
            self._write('"')
            self._token, self._read = "", self._in_string

    def _in_string(self, character: str) -> None:
        """Write the string, except for characters that may begin the closing quote."""
        self._token += character
        if self._token == self._quote:
            if self._surrogate:
                self._write_character("")
            self._arguments += '"'
            self._read = self._after_value
        elif self._token == "\\" and self.syntax.is_json:
            self._read = self._in_escape
        else:
            while not self._quote.startswith(self._token):
                self._write_character(self._token[0])
                self._token = self._token[1:]

    def _in_escape(self, character: str) -> None:
        self._token += character
        kind, digits = self._token[1], self._token[2:]
        if kind not in HEX_ESCAPES:
            text = kind if kind in PLAIN_ESCAPES else ESCAPES.get(kind, self._token)
            self._write_character(text, self._token if kind in JSON_ESCAPES else "")
            self._token, self._read = "", self._in_string
        elif digits and digits[-1] not in "0123456789abcdefABCDEF":
            self._write_character(self._token[:-1])
            self._token, self._read = "", self._in_string
            self._read(character)
        elif len(digits) == HEX_ESCAPES[kind]:
            code = int(digits, 16)
            if 0xDC00 <= code < 0xE000 and self._surrogate:
                code = 0x10000 + ((self._surrogate - 0xD800) << 10) + code - 0xDC00
            self._surrogate = code if 0xD800 <= code < 0xDC00 else 0
            is_character = code < 0x110000 and not 0xD800 <= code < 0xE000
            pair = self._escapes if code >= 0x10000 else ""
            spelling = pair + self._token if kind == "u" and is_character else ""
            self._escapes = self._token if self._surrogate else ""
            if not self._surrogate:
                self._write_character(chr(code) if is_character else "\N{REPLACEMENT CHARACTER}", spelling)
            self._token, self._read = "", self._in_string

    def _write_character(self, text: str, spelling: str = "") -> None:
        """Write a character; in JSON with the escape that it has in the answer, if any."""
        lost = "\N{REPLACEMENT CHARACTER}" if self._surrogate else ""
        self._surrogate = 0
        if not self.syntax.is_json or not spelling:
            spelling = json.dumps(text, ensure_ascii=False)[1:-1]
        self._arguments += lost + spelling

    def _in_word(self, character: str) -> None:
        if self.syntax.word_character.fullmatch(character):
            self._token += character
            return
        value = None if self._is_key else literal(self._token)
        if value is None and self._token:
            value = json.dumps(self._token)
        if value is None:
            self.is_broken = True
        else:
            self._write(value)
            self._after_value(character)

    def _after_value(self, character: str) -> None:
        self._read = self._after_value
        if character.isspace():
            self._keep_space(character)
            return
        space = "" if self.syntax.is_json else " "
        if self._is_key:
            self.is_broken = character != ":"
            self._separator += ":" + space
            self._is_key, self._read = False, self._before_value
        elif character == ",":
            self._separator += "," + space
            self._read = self._before_value
        elif character == self._closings[-1]:
            self._close_bracket(character)
        else:
            self.is_broken = True
            self._write("")  # The space before the character.


class JsonCallScanner(LiteralScanner):
    """Reads `{"name": ..., "arguments": {...}}` after the first brace. The arguments are written as valid JSON.

    Name and arguments may also be in an object `function`, as in OpenAI's API, and the arguments a string with JSON.

    Args:
        names: tools whose name may be the key of the arguments: `{"name": {...}}`.
    """

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        super().__init__(JSON)
        self._names = names
        self._closings = ["}"]
        self._num_wrappers = 1
        self._key = self._name = self._result = ""
        self._is_in_arguments = False
        self._read = self._before_value

    def take_arguments(self) -> str:
        taken, self._result = self._result, ""
        return taken + (super().take_arguments() if self._is_in_arguments else "")

    def _open_bracket(self, bracket: str) -> None:
        is_member = len(self._closings) == self._num_wrappers
        is_wrapper = is_member and self._key == "function" and bracket == "{"
        if is_wrapper:
            self._num_wrappers += 1
        elif is_member and (self._key in ARGUMENT_KEYS or self._key in self._names) and not self.has_arguments:
            if bracket != "{":
                self.is_broken = True
                return
            self._name = self._name or (self._key if self._key in self._names else "")
            self._separator = ""
            self.has_arguments = self._is_in_arguments = True
            self.name = self._name or None
        super()._open_bracket(bracket)
        if is_wrapper:
            self._arguments = ""

    def _close_bracket(self, bracket: str) -> None:
        super()._close_bracket(bracket)
        if self._is_in_arguments and len(self._closings) == self._num_wrappers:
            self._result, self._is_in_arguments = self.take_arguments(), False
        elif len(self._closings) < self._num_wrappers:
            self._num_wrappers -= 1
            self.is_done = not self._closings
            self._arguments = ""
        if self.is_done:
            self.is_broken = not (self._name and self.has_arguments)

    def _after_value(self, character: str) -> None:
        if len(self._closings) == self._num_wrappers and (text := super().take_arguments().strip(" ,:\t\r\n")):
            if self._is_key:
                self._key = json.loads(text)
            elif text[0] == '"' or self._key in ARGUMENT_KEYS:
                self._end_member(json.loads(text) if text[0] == '"' else None if text == "null" else 0)
        if self.is_broken:
            return
        super()._after_value(character)

    def _end_member(self, value: object) -> None:
        """Take a name, or arguments that are no object."""
        if self._key in NAME_KEYS:
            self._name = str(value)
        elif self._key in ARGUMENT_KEYS and not self.has_arguments:
            scanner = JsonCallScanner()
            if value in (None, "") or (isinstance(value, str) and value.lstrip().startswith("{")):
                scanner.feed(f'"name": "_", "arguments": {value or "{}"}}}')
            self.has_arguments, self.is_broken = True, not scanner.is_done or scanner.is_broken
            self._result = scanner.take_arguments()
        if self._name and self.has_arguments and not self.is_broken:
            self.name = self._name


def completion(text: str) -> str:
    """The text that completes JSON arguments which break off in a string or after a value; empty for others."""
    if not text:
        return "{}"
    rest, quote, _ = STRING.sub("", text).partition('"')
    closings = ""
    for character in re.sub(r"[^\[\]{}]", "", rest):
        closings = closings[1:] if character in "}]" else ("}" if character == "{" else "]") + closings
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(text + quote + closings)
        return quote + closings
    return ""


class LiteralCallScanner(LiteralScanner):
    """Reads `call:name{key:value,...}`. The name is known at the first argument or the end, where it is certain."""

    PREFIX = "call:"

    def __init__(self, syntax: LiteralSyntax) -> None:
        super().__init__(syntax)
        self._function = ""
        self._read = self._in_name

    def _in_name(self, character: str) -> None:
        name = self._token.removeprefix(self.PREFIX)
        if character == "{" and name and self._token.startswith(self.PREFIX):
            self._function = name
            self._open_bracket(character)
            return
        self._token += character
        is_name = self._token.startswith(self.PREFIX) and NAME.fullmatch(self._token.removeprefix(self.PREFIX))
        self.is_broken = not (self.PREFIX.startswith(self._token) or is_name)

    def _after_value(self, character: str) -> None:
        super()._after_value(character)
        if self._separator == ": " and not self.is_broken:
            self.name = self._function

    def _close_bracket(self, bracket: str) -> None:
        super()._close_bracket(bracket)
        if not self._closings:
            self.name, self.is_done = self._function, True


def literal(word: str) -> str | None:
    """The JSON of a constant or a number; None if the word is neither."""
    if NUMBER.fullmatch(word):
        return word
    if word in CONSTANTS:
        return CONSTANTS[word]
    for convert in (int, float):
        try:
            number = convert(word)
        except ValueError:
            continue
        return json.dumps(number) if math.isfinite(number) else None
    return None
