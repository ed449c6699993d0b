"""Marked text behaves like a string, and no operation marks content as template text."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chairlift.loading.text.marked_text import (
    MarkedText,
    is_template_text,
    join_marked,
    mask_of,
    template_spans,
    template_text,
    unmarked,
)

TEMPLATE_LETTERS = "AB. \n%"
CONTENT_LETTERS = "cdé, \t%"
pieces = st.lists(
    st.text(TEMPLATE_LETTERS, max_size=4).map(template_text) | st.text(CONTENT_LETTERS, max_size=4).map(MarkedText),
    max_size=5,
)
marked = pieces.map(join_marked)
words = st.one_of(
    marked, st.text(TEMPLATE_LETTERS, max_size=2).map(template_text), st.text(CONTENT_LETTERS, max_size=2)
)
counts = st.integers(-2, 4)

OPERATIONS: dict[str, Callable[[Any, Any, Any, int], Any]] = {
    "add": lambda a, b, c, n: a + b,
    "radd": lambda a, b, c, n: unmarked(b) + a,
    "mul": lambda a, b, c, n: a * n,
    "rmul": lambda a, b, c, n: n * a,
    "slice": lambda a, b, c, n: a[n:],
    "reverse": lambda a, b, c, n: a[::-1],
    "step": lambda a, b, c, n: a[: 2 * n : 2],
    "item": lambda a, b, c, n: a[n] if -len(a) <= n < len(a) else "",
    "iterate": lambda a, b, c, n: list(a),
    "join": lambda a, b, c, n: a.join([b, c, b]),
    "replace": lambda a, b, c, n: a.replace(b, c),
    "replace some": lambda a, b, c, n: a.replace(b, c, n),
    "strip": lambda a, b, c, n: [a.strip(), a.lstrip(), a.rstrip()],
    "strip these": lambda a, b, c, n: [a.strip(b), a.lstrip(b), a.rstrip(b)],
    "remove": lambda a, b, c, n: [a.removeprefix(b), a.removesuffix(b)],
    "split": lambda a, b, c, n: [a.split(), a.rsplit(), a.split(None, n), a.rsplit(None, n)],
    "split at": lambda a, b, c, n: [a.split(b, n), a.rsplit(b, n)] if b else [],
    "splitlines": lambda a, b, c, n: [a.splitlines(), a.splitlines(True)],
    "partition": lambda a, b, c, n: [*a.partition(b), *a.rpartition(b)] if b else [],
    "pad": lambda a, b, c, n: [a.center(9), a.ljust(9, b[:1] or "x"), a.rjust(9, b[:1] or "x"), a.zfill(9)],
    "tabs": lambda a, b, c, n: a.expandtabs(),
    "translate": lambda a, b, c, n: a.translate({ord("A"): "c", ord("c"): "A"}),
    "bytes": lambda a, b, c, n: a.encode().decode(),
    "str": lambda a, b, c, n: str(a),
    "format": lambda a, b, c, n: f"{a}",
}
CASES: dict[str, Callable[[str], str]] = {
    name: getattr(str, name) for name in ("upper", "lower", "casefold", "title", "capitalize", "swapcase")
}


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    else:
        for item in value:
            yield from strings(item)


@given(a=marked, b=words, c=words, n=counts)
def test_operations(a: MarkedText, b: str, c: str, n: int) -> None:
    for name, operation in OPERATIONS.items():
        result = operation(a, b, c, n)
        assert result == operation(unmarked(a), unmarked(b), unmarked(c), n), name
        for text in strings(result):
            mask = mask_of(text)
            assert len(mask) == len(text), name
            marks = zip(unmarked(text), mask, strict=True)
            assert all(letter in TEMPLATE_LETTERS for letter, mark in marks if mark), name


@given(first=st.text(max_size=6), second=st.text(max_size=6))
def test_letter_case(first: str, second: str) -> None:
    mixed = template_text(first) + MarkedText(second)
    for name, convert in CASES.items():
        result = getattr(mixed, name)()
        assert result == convert(first + second), name
        assert len(mask_of(result)) == len(result), name
        assert is_template_text(result) == (is_template_text(mixed) or not result), name
        assert not any(mask_of(getattr(MarkedText(first), name)())), name


@given(a=pieces, values=st.lists(words | st.integers(), max_size=3))
def test_printf_style(a: list[MarkedText], values: list[Any]) -> None:
    layout = template_text("A%sB%%%d.")
    given = (*values, "c", 3)[:2]
    if isinstance(given[1], int):
        result = layout % given
        assert result == unmarked(layout) % given
        assert result.startswith("A")
        assert mask_of(result)[0]
        assert mask_of(result)[1 : 1 + len(str(given[0]))] == mask_of(str(given[0]))
    for text in (join_marked(a), template_text("%5s|%r")):
        try:
            expected = unmarked(text) % tuple(values)
        except (TypeError, ValueError, OverflowError):
            continue
        assert text % tuple(values) == expected


def test_known_cases() -> None:
    text = template_text("<|") + "user" + template_text("|>") + "hi"
    assert template_spans(text) == [(0, 2), (6, 8)]
    assert template_spans(text.replace("user", template_text("role"))) == [(0, 8)]
    assert template_spans("x".join([text])) == []
    assert template_spans(MarkedText("x").join([text, text])) == [(0, 2), (6, 8), (11, 13), (17, 19)]
    assert template_spans(text.upper().strip()) == [(0, 2), (6, 8)]
    assert template_spans("".join(["a", text])) == [], "operations of plain strings lose the marks"
    assert template_spans(template_text("x").ljust(3, "y")) == []


@given(marked)
def test_marks_survive_pickling(text: MarkedText) -> None:
    again = pickle.loads(pickle.dumps(text))
    assert (again, mask_of(again)) == (text, mask_of(text))
    assert json.loads(json.dumps(text)) == text
    assert type(unmarked(text)) is str


def test_template_cannot_access_the_marks() -> None:
    assert {name for name in dir(MarkedText) if not name.startswith("_")} == set(dir(str)) & {
        name for name in dir(str) if not name.startswith("_")
    }
    assert (hash(MarkedText("a")), {"a": 1}[template_text("a")]) == (hash("a"), 1)
