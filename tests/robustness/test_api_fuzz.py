"""The short run of schemathesis with one seed. The long run is `make fuzz-api`."""

from __future__ import annotations

from pathlib import Path

from chairlift import AsyncLLM
from support.running_server import run_server
from support.tiny_engine import tiny_options

CASES = 30
SEED = 7


def test_generated_calls_conform_to_the_schema(tmp_path: Path) -> None:
    from tools.generated_calls import SERVER_OPTIONS, fuzz_api, fuzz_bodies  # it imports schemathesis, which is slow

    with run_server(AsyncLLM(**tiny_options(tmp_path, **SERVER_OPTIONS)), "tiny") as server:
        outcome = fuzz_api(server.url, CASES, SEED)
        statuses = fuzz_bodies(server.url, CASES, SEED)
        server.wait_until_idle()
    assert outcome.num_cases > 0.7 * CASES, "the spaces of some operations are small"
    assert {200, 400} <= {status for _, status in outcome.statuses}
    assert {200, 400} <= statuses.keys()
