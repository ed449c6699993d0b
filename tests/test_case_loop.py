"""A loop over cases runs all of them, and reports those that fail."""

from __future__ import annotations

import inspect

import pytest

from support.case_loop import loop_over


@loop_over(("number", "text"), [(1, "1"), (2, "3"), (0, "0")])
@loop_over("sign", ["", "-"])
def numbers(base: int, number: int, text: str, sign: str) -> None:
    with pytest.raises(ZeroDivisionError):
        _ = base / number
    assert f"{sign}{number}" == f"{sign}{text}"


def test_all_cases_that_fail_are_reported() -> None:
    assert list(inspect.signature(numbers).parameters) == ["base"], "what is left are fixtures"
    with pytest.raises(ExceptionGroup, match="2 of 3 cases fail") as caught:
        numbers(base=5)
    assert [error.__notes__ for error in caught.value.exceptions] == [
        ["with number=1, text='1'"],
        ["with number=2, text='3'"],
    ]
    inner = caught.value.exceptions[0]
    assert isinstance(inner, ExceptionGroup)
    assert [error.__notes__ for error in inner.exceptions] == [["with sign=''"], ["with sign='-'"]]
    assert "DID NOT RAISE" in str(inner.exceptions[0])
