"""Tests of native kernels run where these are compiled."""

from __future__ import annotations

import pytest

from chairlift.kernels.cpu import NativeUnavailableError, load


def why_not() -> str | None:
    """Why the native kernels cannot be loaded; None: they can."""
    try:
        load()
    except NativeUnavailableError as error:
        return str(error)
    return None


needs_native = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
