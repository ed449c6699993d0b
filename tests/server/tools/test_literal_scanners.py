"""Calls in the form of Python are converted to JSON while they are generated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.server.tools.literal_scanners import PYTHON, LiteralCallScanner, completion

constants = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text("ab1 '\"\\\n\t\0\u00e9\u2028\U0001f600{}[]()=,:", max_size=8)
values = st.recursive(
    constants | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
arguments = st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,7}", fullmatch=True), values, max_size=4)


def scan(text: str) -> tuple[LiteralCallScanner, str, str]:
    """The scanner, the arguments and the text that is left."""
    scanner = LiteralCallScanner(PYTHON)
    num_read = scanner.feed(text)
    return scanner, scanner.take_arguments(), text[num_read:]


@given(arguments)
def test_calls_as_python_writes_them(given: dict[str, Any]) -> None:
    text = f"f({', '.join(f'{key}={value!r}' for key, value in given.items())})"
    scanner, found, rest = scan(text + " and more")
    assert (scanner.name, scanner.is_done, scanner.is_broken, rest) == ("f", True, False, " and more")
    assert json.loads(found) == given


@given(arguments)
def test_calls_with_values_in_json(given: dict[str, Any]) -> None:
    scanner, found, _ = scan(f"f({', '.join(f'{key}={json.dumps(value)}' for key, value in given.items())})")
    assert scanner.is_done
    if "\U0001f600" not in str(given):  # JSON writes it as two escapes, which are no characters in Python.
        assert json.loads(found) == given


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("f(a = (1, 2,), b={'c': 1,},)", '{"a": [1, 2], "b": {"c": 1}}'),
        (r"f(a='\x41\u00e9\U0001F600\q\\')", '{"a": "A\u00e9\U0001f600\\\\q\\\\"}'),
        ("f(a=1_000, b=+5, c=.5)", '{"a": 1000, "b": 5, "c": 0.5}'),
        ("ns.f-2()", "{}"),
    ],
)
def test_forms_of_literals(text: str, found: str) -> None:
    scanner, arguments, _ = scan(text)
    assert (scanner.is_done, arguments) == (True, found)


@pytest.mark.parametrize("text", ["f(1)", "f(a b=1)", "f(,)", "print(f(a=1))", "1f()", "f (a=1)", "(a=1)"])
def test_text_that_is_no_call_has_no_name(text: str) -> None:
    scanner, _arguments, rest = scan(text)
    assert (scanner.name, scanner.is_broken) == (None, True)
    assert rest


@pytest.mark.parametrize("value", ["nan", "x", "[1 2]", "{1: 2}", "{'a': }", r"'\xg1'", "[,]", "{'a'}", "g(1)"])
def test_values_that_are_no_literals_break_the_call(value: str) -> None:
    scanner, found, rest = scan(f"f(a={value})")
    assert (scanner.name, scanner.is_done, scanner.is_broken) == ("f", False, True)
    assert json.loads(found + completion(found)), "the client gets valid JSON"
    assert rest
