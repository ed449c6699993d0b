"""A count of the operations of Python code, by which tests check the growth of a cost without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

LINEAR_METHODS: Final = frozenset({"count", "index", "remove", "insert", "copy", "sort", "reverse", "find", "replace"})
"""Methods in C that read a whole list, tuple, string or bytes."""


def count_operations(function: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs and its calls into C, each weighted with the length of its object.

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
