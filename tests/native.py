"""The mark of tests that need the native kernels."""

from __future__ import annotations

import pytest

from chairlift.kernels.cpu import NativeUnavailableError, load


def why_not() -> str | None:
    """The reason why the native kernels cannot be loaded, or None."""
    try:
        load()
    except NativeUnavailableError as error:
        return str(error)
    return None


needs_native = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
