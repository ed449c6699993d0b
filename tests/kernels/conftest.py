"""Fixtures for tests of native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chairlift.kernels.cpu import load
from support.native import ISAS, selected_isa


@pytest.fixture(params=ISAS, scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the tests on every instruction set of this CPU, or on those of a mark."""
    with selected_isa(request.param) as name:
        yield name


@pytest.fixture(scope="module")
def same_threads() -> Iterator[None]:
    """Restore the number of threads and the order of tiles after the tests of a module."""
    native = load()
    before = native.num_threads()
    yield
    native.set_num_threads(before)
    native.set_tile_order(0)
