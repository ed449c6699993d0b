"""Fixtures for tests of native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chairlift.kernels.cpu import load
from native import unavailable_reason

ISAS = [] if unavailable_reason() else load().available_isas()


@pytest.fixture(params=ISAS, scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the tests on every instruction set of this CPU."""
    native = load()
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.fixture(scope="module")
def same_threads() -> Iterator[None]:
    """Restore the number of threads and the order of tiles after the tests of a module."""
    native = load()
    before = native.num_threads()
    yield
    native.set_num_threads(before)
    native.set_tile_order(0)
