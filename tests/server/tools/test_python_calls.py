"""Calls in the syntax of Python are found, and their values are those of Python."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chairlift.server.tools.python_calls import PythonCallScanner, python_calls, python_value
from support.case_loop import loop_over

constants = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text("ab1 '\"\\\n\t\0\u00e9\u2028\U0001f600{}[]()=,:", max_size=8)
values = st.recursive(
    constants | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
arguments = st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,7}", fullmatch=True), values, max_size=4)


def read(text: str) -> list[tuple[str, Any]] | None:
    """The calls; None if the text is anything else."""
    try:
        return [(name, json.loads(arguments)) for name, arguments in python_calls(text)]
    except ValueError:
        return None


@given(st.lists(arguments, min_size=1, max_size=3))
def test_calls_as_python_writes_them(given: list[dict[str, Any]]) -> None:
    calls = [f"f({', '.join(f'{key}={value!r}' for key, value in each.items())})" for each in given]
    assert read(f"[{', '.join(calls)}]") == [("f", each) for each in given]
    assert read(calls[0]) == [("f", given[0])]


@given(arguments)
def test_calls_with_values_in_json(given: dict[str, Any]) -> None:
    assert read(f"f({', '.join(f'{key}={json.dumps(value)}' for key, value in given.items())})") == [("f", given)]


@given(st.lists(arguments, min_size=1, max_size=3), st.sampled_from(["", ")", " x", ", f(a=1)"]))
def test_the_end_of_calls_is_found(given: list[dict[str, Any]], more: str) -> None:
    calls = [f"f({', '.join(f'{key}={value!r}' for key, value in each.items())})" for each in given]
    text = f"[{', '.join(calls)}]"
    scanner = PythonCallScanner(frozenset("f"))
    assert (scanner.feed(text + more), scanner.is_done) == (len(text), True)


@given(
    st.lists(
        st.sampled_from(["'", '"', "r'", "\\", "(", ")", "[", "]", "{", "}", ",", "a=", "f(", "#", "\n", "1", ":"])
    )
)
def test_text_of_any_kind_is_calls_or_a_value_error(parts: list[str]) -> None:
    for text in ("f(a=" + "".join(parts), "[f(a='" + "".join(parts)):
        found = read(text)
        assert found is None or text.startswith(("f(", "[f("))


@loop_over("depth", [200, 20_000])
def test_deep_values_are_not_read(depth: int) -> None:
    for text in ("[" * depth, "-" * depth + "1", "1+" * depth + "1", "[" * depth + "]" * depth, "f(a=" * depth):
        assert read(f"f(a={text})") is None


def reading_time(text: str) -> float:
    """The processor time of reading a text as calls with strings of any form and as a value, the least of five."""
    times = []
    for _ in range(5):
        start = time.process_time()
        for function in (lambda: python_calls(text, has_raw_strings=True), lambda: python_value(text)):
            with contextlib.suppress(ValueError):
                function()
        times.append(time.process_time() - start)
    return min(times)


@loop_over(
    ("start", "part", "end"),
    [
        ("f(x=", "\\'''a'", ")"),
        ("f(x=", '\\"""a"', ")"),
        ("f(x=", "'\\", ")"),
        ("f(x=", '"\\', ")"),
        ("f(x='a'", " ", "x"),
        ("f(x='a',", " ", "x"),
        ("f(x='a')", " ", "x"),
        ("f(x='a'),", " ", "x"),
        ("[f(x='a')]", " ", "x"),
        ("f(x='", "') ", "x"),
    ],
)
def test_text_that_is_no_call_is_read_in_linear_time(start: str, part: str, end: str) -> None:
    """Eight times the text takes 64 times as long if its parts are compared with each other."""
    small, large = (reading_time(start + part * count + end) for count in (500, 4000))
    assert large < 24 * small
