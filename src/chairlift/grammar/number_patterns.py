"""Regular expressions of the decimal numbers within exact bounds."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor
from typing import Final

FRACTION: Final = r"(\.[0-9]+)?"
NONZERO_FRACTION: Final = r"\.[0-9]*[1-9][0-9]*"


def integer_pattern(low: int | None, high: int | None) -> str:
    """The pattern of the integers from `low` to `high`; None is no bound. Raises ValueError if there are none."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"no integer is between {low} and {high}")
    negative = "" if low is not None and low >= 0 else _naturals(1 if high is None else max(1, -high), _negated(low))
    positive = "" if high is not None and high < 0 else _naturals(0 if low is None else max(0, low), high)
    return "|".join([f"-({negative})"] * bool(negative) + [positive] * bool(positive))


def real_pattern(low: Fraction | None, high: Fraction | None, *, has_low: bool, has_high: bool) -> str:
    """The pattern of the numbers from `low` to `high`, without exponents.

    Args:
        has_low, has_high: whether the bounds themselves are numbers of the range; a bound must be an integer.
    """
    if low is not None and high is not None and (low > high or (low == high and not (has_low and has_high))):
        raise ValueError(f"no number is between {low} and {high}")
    if low is not None and low >= 0:
        return _positive_reals(low, high, has_low, has_high)
    if high is not None and high <= 0:
        zero = r"|0(\.0+)?" if high == 0 and has_high else ""
        return f"-({_positive_reals(-high, None if low is None else -low, has_high, has_low)}){zero}"
    below, above = None if low is None else -low, high
    origin = Fraction(0)
    return f"-({_positive_reals(origin, below, False, has_low)})|{_positive_reals(origin, above, True, has_high)}"


def _positive_reals(low: Fraction, high: Fraction | None, has_low: bool, has_high: bool) -> str:
    first, last = ceil(low), None if high is None else floor(high)
    parts = [] if has_low else [f"{first}{NONZERO_FRACTION}"]
    start, end = first + (not has_low), None if last is None else last - 1
    if end is None or start <= end:
        parts.append(f"({_naturals(start, end)}){FRACTION}")
    if has_high and last is not None:
        parts.append(rf"{last}(\.0+)?")
    return "|".join(parts)


def _negated(bound: int | None) -> int | None:
    return None if bound is None else -bound


def _naturals(low: int, high: int | None) -> str:
    """The pattern of the integers from `low` >= 0; empty if there are none."""
    if high is not None and low > high:
        return ""
    first = str(low)
    if high is None:
        return f"{_between(first, '9' * len(first))}|[1-9][0-9]{{{len(first)},}}"
    last = str(high)
    if len(first) == len(last):
        return _between(first, last)
    longer = len(last) - len(first) - 1
    middle = [f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}"] if longer else []
    return "|".join([_between(first, "9" * len(first)), *middle, _between("1" + "0" * (len(last) - 1), last)])


def _between(first: str, last: str) -> str:
    """The pattern of the digits from `first` to `last`, which have the same number of digits, in linear size."""
    if not first:
        return ""
    head, tail, num_rest = first[0], last[0], len(first) - 1
    rest = f"[0-9]{{{num_rest}}}" if num_rest else ""
    if first[1:] == "0" * num_rest and last[1:] == "9" * num_rest:
        return f"[{head}-{tail}]{rest}"
    if head == tail:
        return f"{head}({_between(first[1:], last[1:])})"
    parts = [f"{head}({_between(first[1:], '9' * num_rest)})", f"{tail}({_between('0' * num_rest, last[1:])})"]
    if int(tail) - int(head) > 1:
        parts.append(f"[{int(head) + 1}-{int(tail) - 1}]{rest}")
    return "|".join(parts)
