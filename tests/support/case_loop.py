"""A loop over the cases of one test, for cases that differ in a value and share all fixtures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest


def loop_over(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[..., Callable[..., None]]:
    """Run a test once for each case, and report all cases that fail, with their values.

    Unlike with `pytest.mark.parametrize`, the cases are one test and share its fixtures, which they must not change.

    Args:
        names: the parameter of the test that is the case, or those that are its elements.
        cases: their values.
    """
    keys = (names,) if isinstance(names, str) else names
    values = [(case,) if isinstance(names, str) else case for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run_cases(**fixtures: Any) -> None:
            errors = []
            for case in values:
                arguments = dict(zip(keys, case, strict=True))
                try:
                    test(**fixtures, **arguments)
                except (Exception, pytest.fail.Exception) as failure:
                    # `pytest.raises` fails with an exception that is not an Exception and cannot be in a group.
                    error = failure if isinstance(failure, Exception) else AssertionError(str(failure))
                    error.with_traceback(failure.__traceback__)
                    error.add_note("with " + ", ".join(f"{name}={value!r:.200}" for name, value in arguments.items()))
                    errors.append(error)
            if errors:
                raise ExceptionGroup(f"{len(errors)} of {len(values)} cases fail", errors)

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run_cases.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_cases

    return decorate
