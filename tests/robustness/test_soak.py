"""The short soak, with one seed. `make soak` is the long one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from served import serve
from soak import soak
from soak_load import SERVER_OPTIONS

from tiny_engine import tiny_options

REQUESTS = 150


def test_nothing_is_left_of_many_requests(tmp_path: Path) -> None:
    with serve(tiny_options(tmp_path, **SERVER_OPTIONS)) as served:
        tally, _marks = asyncio.run(soak(served, REQUESTS, seed=3, rounds=3))
    assert tally.outcomes["answered"] > REQUESTS / 2
    assert min(tally.outcomes["given up"], tally.outcomes["refused"], tally.kinds["structured_outputs"]) > 0
