"""A pytest mark for tests that require the native kernels."""

from __future__ import annotations

import pytest

from chairlift.kernels.cpu import NativeUnavailableError, load


def unavailable_reason() -> str | None:
    """The reason why the native kernels cannot be loaded, or None."""
    try:
        load()
    except NativeUnavailableError as error:
        return str(error)
    return None


needs_native = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
