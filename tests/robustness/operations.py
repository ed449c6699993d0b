"""Counts what Python code does, so that the growth of its cost can be tested without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

LINEAR_METHODS: Final = frozenset({"count", "index", "remove", "insert", "copy", "sort", "reverse", "find", "replace"})
"""Methods in C that look at all of a list, tuple, string or bytes."""


def count_operations(function: Callable[[], object]) -> int:
    """The lines of Python that a call runs, and the calls into C, each weighed with the length of what it looks at.

    Operators on whole sequences, and work inside of one C function (a JSON parser, a tokenizer), count as one.
    """
    total = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal total
        total += event == "line"
        return trace

    def profile(_frame: FrameType, event: str, argument: Any) -> None:
        nonlocal total
        if event == "c_call":
            owner = getattr(argument, "__self__", None)
            is_linear = argument.__name__ in LINEAR_METHODS and isinstance(owner, list | tuple | str | bytes)
            total += 1 + (len(owner) if is_linear else 0)

    old_trace, old_profile = sys.gettrace(), sys.getprofile()
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(old_trace)
        sys.setprofile(old_profile)
    return total
