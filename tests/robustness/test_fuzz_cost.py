"""The cost of preparing a request grows at most linearly with its size, in every field of every endpoint.

Operations are counted here, not time: `make fuzz-cost` measures the same cases on a running server.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.cost_cases import BASES, MAX_RATIO, PATHS, all_cases

from chairlift import AsyncLLM
from chairlift.errors import RequestError
from chairlift.server.api.routes import ENDPOINTS, parse_json
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.preparation.conversation import ModelPlanner
from server.api_model import with_api_tokenizer
from support.byte_tokenizer import VOCAB_SIZE
from support.operations import count_operations

SMALLEST = 4 << 10
"""Bytes of the smallest of three bodies, each twice as large as the one before."""

FEW_OPERATIONS = 2000
"""Counts below this are mostly what every request costs."""

CASES = all_cases()
ENDPOINT_OF = {endpoint.path: endpoint for endpoint in ENDPOINTS}


@pytest.fixture(scope="module")
def planner(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelPlanner]:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1 << 16)
    folder = with_api_tokenizer(tiny, tmp_path_factory.mktemp("cost"))
    llm = AsyncLLM(model=str(folder), num_kv_blocks=5000, num_threads=1)
    yield ModelPlanner(llm.engine, ApiOptions())
    llm.close()


def prepare(planner: ModelPlanner, path: str, body: bytes) -> Any:
    """The plan of a body, or its error."""
    endpoint = ENDPOINT_OF[path]
    try:
        return endpoint.plan(planner, parse_json(endpoint.body, body))
    except RequestError as error:
        return error


def ratios(counts: list[int]) -> list[float]:
    return [after / before for before, after in itertools.pairwise(counts) if after > FEW_OPERATIONS]


@pytest.mark.parametrize("endpoint", sorted(BASES))
def test_cost_grows_at_most_linearly(planner: ModelPlanner, endpoint: str) -> None:
    path = PATHS[endpoint]
    worst: dict[str, list[int]] = {}
    for case in (case for case in CASES if case.endpoint == endpoint):
        bodies = [case.body(SMALLEST << doubling) for doubling in range(3)]
        prepare(planner, path, bodies[0])  # what is imported and cached at first use is not part of the growth
        counts = [count_operations(lambda body=body: prepare(planner, path, body)) for body in bodies]
        if max(ratios(counts), default=0.0) > MAX_RATIO:
            worst[case.field] = counts
    assert not worst


def test_cases_cover_every_endpoint_and_most_are_valid_requests(planner: ModelPlanner) -> None:
    outcomes = [prepare(planner, PATHS[case.endpoint], case.body(SMALLEST)) for case in CASES]
    assert {case.endpoint for case in CASES} == set(BASES)
    valid = sum(not isinstance(outcome, RequestError) for outcome in outcomes)
    assert valid > len(CASES) / 3, [
        (case.field, outcome)
        for case, outcome in zip(CASES, outcomes, strict=True)
        if isinstance(outcome, RequestError)
    ]


def test_a_quadratic_check_is_found() -> None:
    def check(names: list[str]) -> set[str]:
        return {name for name in names if names.count(name) > 1}

    counts = [count_operations(lambda size=size: check([f"n{i}" for i in range(size)])) for size in (100, 200, 400)]
    assert min(ratios(counts)) > MAX_RATIO
