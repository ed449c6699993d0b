"""The short soak test with one seed. The long run is `make soak`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from served import serve
from soak import soak
from soak_load import SERVER_OPTIONS

from tiny_engine import tiny_options

REQUESTS = 150


def test_no_resources_leak_after_many_requests(tmp_path: Path) -> None:
    with serve(tiny_options(tmp_path, **SERVER_OPTIONS)) as served:
        tally, _marks = asyncio.run(soak(served, REQUESTS, seed=3, rounds=3))
    assert tally.outcomes["answered"] > REQUESTS / 2
    assert min(tally.outcomes["aborted"], tally.outcomes["rejected"], tally.kinds["structured_outputs"]) > 0
