"""Calls in the syntax of Python: where they end, and their names and arguments, whose values must be literals."""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any, Final

from chairlift.server.tools.literal_scanners import NAME, CallScanner

CLOSINGS: Final = {"(": ")", "[": "]", "{": "}"}
SPACE: Final = r"(?:\s|#[^\n]*\n)*+"
HEAD: Final = re.compile(rf"{SPACE}({NAME.pattern})\(")
KEY: Final = re.compile(rf"{SPACE}([\w.+-]{{1,128}}){SPACE}=(?!=){SPACE}")
COMMA: Final = re.compile(rf"{SPACE},")
CALL_END: Final = re.compile(rf"{SPACE}\)")
END: Final = re.compile(rf"{SPACE}(?:#[^\n]*)?\Z")
LIST_END: Final = re.compile(rf"{SPACE}(?:,{SPACE})?\]\s*\Z")
STRING: Final = re.compile(r"""(\b[rRuUbBfF]{1,2})?(('''|\"""|'|")(?:\\.|(?!\3)[^\\])*+\3?)""", re.S)
"""A string. One that is not closed reaches to the end, so that no text is read again."""
COMMENT_OR_STRING: Final = re.compile(rf"#[^\n]*+|{STRING.pattern}", re.S)
TOKEN: Final = re.compile(rf"""{STRING.pattern}|#[^\n]*+|[()\[\]{{}},]|[^'"#()\[\]{{}},rRuUbBfF]++|.""", re.S)
ESCAPE: Final = re.compile(r"\\.|[\n\r\0]", re.S)
ESCAPED: Final = "\n\\'\"abfnrtv01234567xNuU"
REPLACED: Final = {"\n": "\\n", "\r": "\\r", "\0": "\\x00", "\\/": "/"}
RAW_STRING: Final = re.compile(
    rf"'(.*?)'(?=\s*+(?:,\s*+[\w.+-]{{1,128}}+\s*+=|\)\s*+(?:,\s*+{NAME.pattern}\(|\]?\s*+\Z)))", re.S
)
"""A string without escapes, as LFM2.5 writes it: it ends before the next argument, the next call or the end."""

JSON_CONSTANTS: Final = {"null": None, "true": True, "false": False}


class PythonCallScanner(CallScanner):
    """Finds the end of calls while they are generated: of a list, or before other text than a call."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names, self._name = names, ""
        self._closings: list[str] = []
        self._is_list = self._has_calls = False
        self._quote, self._num_quotes = "", 0
        self._read = self._outside_call

    def _outside_call(self, character: str) -> None:
        if NAME.fullmatch(self._name + character):
            self._name += character
        elif character == "(" and self._name in self._names:
            self._name, self._read, self._has_calls = "", self._in_call, True
            self._closings.append(")")
        elif character == "[" and not self._has_calls and not self._is_list and not self._name:
            self._is_list = True
            self._closings.append("]")
        elif self._name:
            self.is_broken = True
        elif character == "#":
            self._read = self._in_comment
        else:
            self.is_done = self._is_list and character == "]"
            self.is_broken = not (self.is_done or character.isspace() or (self._is_list and character == ","))

    def _in_call(self, character: str) -> None:
        if character in "'\"":
            self._quote, self._num_quotes, self._read = character, 1, self._in_quotes
        elif character in CLOSINGS:
            self._closings.append(CLOSINGS[character])
        elif character in ")]}":
            self.is_broken = self._closings[-1] != character
            if not self.is_broken:
                self._closings.pop()
                self._read = self._outside_call if len(self._closings) == self._is_list else self._in_call
        elif character == "#":
            self._read = self._in_comment

    def _in_comment(self, character: str) -> None:
        if character == "\n":
            self._read = self._outside_call if len(self._closings) == self._is_list else self._in_call

    def _in_quotes(self, character: str) -> None:
        """Read the quotes that open a string: one, two of an empty string, or three."""
        if character == self._quote:
            self._num_quotes += 1
            if self._num_quotes < 3:
                return
        if self._num_quotes == 2:
            self._read = self._in_call
        else:
            self._quote, self._num_quotes, self._read = self._quote * self._num_quotes, 0, self._in_string
        if character != self._quote[0]:
            self._read(character)

    def _in_string(self, character: str) -> None:
        if character == "\\":
            self._read = self._in_escape
        self._num_quotes = self._num_quotes + 1 if character == self._quote[0] else 0
        if self._num_quotes == len(self._quote):
            self._read = self._in_call

    def _in_escape(self, _character: str) -> None:
        self._read = self._in_string


def python_calls(text: str, has_raw_strings: bool = False) -> list[tuple[str, str]]:
    """The names of calls, and their arguments as JSON.

    Args:
        text: calls `name(key=value, ...)`, or a list of calls.
        has_raw_strings: strings of a text that is not Python are read as `RAW_STRING`.

    Raises:
        ValueError: the text is anything else, or a value is not a literal that JSON has.
    """
    try:
        return _CallReader(text, False).calls()
    except SyntaxError:
        if not has_raw_strings:
            raise ValueError("no calls") from None
    try:
        return _CallReader(text, True).calls()
    except SyntaxError as error:
        raise ValueError("no calls") from error


class _CallReader:
    def __init__(self, text: str, has_raw_strings: bool) -> None:
        self._text, self._has_raw_strings = text, has_raw_strings
        self._at = 0

    def calls(self) -> list[tuple[str, str]]:
        text = self._text.strip()
        self._text, is_list = text, text.startswith("[")
        self._at = int(is_list)
        found = [self._call()]
        while not (LIST_END if is_list else END).match(text, self._at):
            if is_list:
                self._skip(COMMA)
            found.append(self._call())
        return found

    def _skip(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise SyntaxError(f"no {pattern.pattern} at {self._at}")
        self._at = found.end()
        return found

    def _call(self) -> tuple[str, str]:
        name, arguments = self._skip(HEAD)[1], dict[str, Any]()
        while not (end := CALL_END.match(self._text, self._at)):
            if arguments:
                self._skip(COMMA)
                if end := CALL_END.match(self._text, self._at):
                    break
            key = self._skip(KEY)[1]
            if key in arguments:
                raise ValueError(f"the argument {key!r} occurs twice")
            arguments[key] = self._value()
        self._at = end.end()
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)

    def _value(self) -> Any:
        if self._has_raw_strings and self._text.startswith("'", self._at):
            return self._skip(RAW_STRING)[1]
        start, depth = self._at, 0
        for token in TOKEN.finditer(self._text, start):
            if not depth and token[0] in (",", ")"):
                self._at = token.start()
                return _literal(self._text[start : self._at])
            depth += (token[0] in CLOSINGS) - (token[0] in CLOSINGS.values())
        raise SyntaxError("a call without an end")


def python_value(text: str) -> Any:
    """The value of a literal of Python, or of JSON, as JSON has it: tuples and sets are lists, keys are strings.

    Raises ValueError if the text is anything else.
    """
    try:
        return _literal(text)
    except SyntaxError as error:
        raise ValueError("no literal") from error


def _literal(text: str) -> Any:
    """As `python_value`; raises SyntaxError if the text is not Python."""
    try:
        match ast.parse(f"_(_={COMMENT_OR_STRING.sub(_escaped, text)}\n)", mode="eval").body:
            case ast.Call(func=ast.Name(), args=[], keywords=[ast.keyword(value=node)]):
                return _value(node)
    except (MemoryError, RecursionError, TypeError) as error:
        raise ValueError("no literal") from error
    raise ValueError("no literal")


def _escaped(string: re.Match[str]) -> str:
    """A comment, or a string with line breaks and the escapes of JSON as Python writes them.

    Python would warn of unknown escapes.
    """
    if string[2] is None or "r" in (string[1] or "").lower():
        return string[0]
    return ESCAPE.sub(lambda found: REPLACED.get(found[0]) or _known_escape(found[0]), string[0])


def _known_escape(text: str) -> str:
    return text if text[1] in ESCAPED else "\\" + text


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int()):
            return node.value
        case ast.Constant(value=float(number)) if math.isfinite(number):
            return number
        case ast.Constant(value=str(text)):  # Escapes of JSON may be the halves of a character.
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case ast.JoinedStr(values=parts) if all(isinstance(part, ast.Constant) for part in parts):
            return "".join(map(_value, parts))
        case ast.Name(id=name) if name in JSON_CONSTANTS:
            return JSON_CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            if not isinstance(number, bool):
                return _value(ast.Constant(-number if isinstance(sign, ast.USub) else number))
        case ast.Set(elts=parts):
            return list(dict.fromkeys(map(_value, parts)))
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return list(map(_value, parts))
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {
                _key(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key is not None
            }
    raise ValueError(f"no literal: {ast.dump(node):.100}")


def _key(value: Any) -> str:
    if isinstance(value, (list, dict)):
        raise ValueError("a list as a key")
    return value if isinstance(value, str) else json.dumps(value)
