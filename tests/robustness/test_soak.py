"""The short soak test with one seed. The long run is `make soak`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tools.soak import check_descriptors, serve_models, soak
from tools.soak_calls import SoakCalls

ROUNDS = 2


def test_nothing_is_left_of_many_requests(tmp_path: Path) -> None:
    rounds = iter(range(ROUNDS))
    with serve_models(tmp_path) as served:
        calls = SoakCalls(served.url, tmp_path / "adapter", seed=3)
        result = asyncio.run(soak(served, calls, 4, lambda: next(rounds, None) is not None, size=0.1))
    check_descriptors(result)
    tally = result.tally
    assert tally.outcomes["answered"] > tally.num_requests / 2
    assert min(tally.outcomes["aborted"], tally.outcomes["rejected"], tally.kinds["structured_outputs"]) > 0
    assert sum(result.calls.values()) == 12 * ROUNDS
