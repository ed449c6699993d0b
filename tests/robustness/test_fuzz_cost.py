"""The cost of preparing a request grows at most linearly with its size, in every field of every endpoint.

Operations are counted here, not time: `make fuzz-cost` measures the same cases on a running server.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cost_cases import BASES, NUMBER, PATHS, Case, all_cases, items

from byte_tokenizer import VOCAB_SIZE
from chairlift import AsyncLLM
from chairlift.errors import RequestError
from chairlift.server.api.endpoints import make_planners
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.preparation.planners import PlanningModel, PreparedRequest
from chairlift.server.preparation.worker import prepare
from operations import count_operations
from server.api_model import with_api_tokenizer

MAX_RATIO = 2.6
SMALLEST = 4 << 10
"""Bytes of the smallest of three bodies, each twice as large as the one before."""

FEW_OPERATIONS = 2000
"""Counts below this are mostly what every request costs."""

MAX_RETURNED = 1024
"""Objects in the fields that are read after a request was prepared."""

GENERATING = {"completions", "chat", "responses", "messages"}
READ_LATER = {
    *("stop_token_ids", "allowed_token_ids", "structured_outputs"),
    *("response_format", "text", "output_config", "output_format", "tools"),
}
"""Fields with limits of their own, which are read after a request was prepared: by the engine, or for the response."""

CASES = all_cases()
PLANNERS = make_planners()


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlanningModel]:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1 << 16)
    folder = with_api_tokenizer(tiny, tmp_path_factory.mktemp("cost"))
    llm = AsyncLLM(model=str(folder), num_kv_blocks=5000, num_threads=1)
    yield PlanningModel(llm.engine, ApiOptions())
    llm.close()


def outcome_of(model: PlanningModel, case: Case, size: int) -> PreparedRequest | RequestError:
    return prepare(PLANNERS[PATHS[case.endpoint]], model, case.body(size))


def ratios(counts: list[int]) -> list[float]:
    return [after / before for before, after in itertools.pairwise(counts) if after > FEW_OPERATIONS]


@pytest.mark.parametrize("endpoint", sorted(BASES))
def test_cost_grows_at_most_linearly(model: PlanningModel, endpoint: str) -> None:
    planner = PLANNERS[PATHS[endpoint]]
    worst: dict[str, list[int]] = {}
    for case in (case for case in CASES if case.endpoint == endpoint):
        bodies = [case.body(SMALLEST << doubling) for doubling in range(3)]
        prepare(planner, model, bodies[0])  # what is imported and cached at first use is not part of the growth
        counts = [count_operations(lambda body=body: prepare(planner, model, body)) for body in bodies]
        if max(ratios(counts), default=0.0) > MAX_RATIO:
            worst[case.field] = counts
    assert not worst


def test_cases_cover_every_endpoint_and_most_are_valid_requests(model: PlanningModel) -> None:
    outcomes = [outcome_of(model, case, SMALLEST) for case in CASES]
    assert {case.endpoint for case in CASES} == set(BASES)
    valid = sum(isinstance(outcome, PreparedRequest) for outcome in outcomes)
    assert valid > len(CASES) / 3, [
        (case.field, outcome)
        for case, outcome in zip(CASES, outcomes, strict=True)
        if isinstance(outcome, RequestError)
    ]


def test_bodies_are_json_of_nearly_the_requested_size() -> None:
    of_fixed_size = "structured_outputs.regex (repetition)"
    for case in CASES:
        body = case.body(4 * SMALLEST)
        json.loads(body)
        assert len(body) > 3.5 * SMALLEST or case.field == of_fixed_size, (case, len(body))
        assert len(body) <= 4 * SMALLEST


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 2500])
def test_the_number_of_items_is_as_requested_and_their_names_differ(count: int) -> None:
    names = json.loads("[" + items(f'"n{NUMBER}"', count) + "]")
    assert names == [f"n{1000 + n}" for n in range(count)]
    assert json.loads(f"[{items('3', count)}]") == [3] * count


def test_the_p99_is_of_the_gaps_beside_the_largest_call() -> None:
    from fuzz_cost import MIN_GAPS, p99  # it imports this module

    few_slow = [0.01] * MIN_GAPS + [0.5] * 2
    assert p99(few_slow, start=MIN_GAPS) == 0.5
    assert p99(few_slow + [0.01] * MIN_GAPS, start=MIN_GAPS) == 0.5
    assert p99([0.5] * 5 + [0.01] * MIN_GAPS, start=5) == 0.01


def test_a_quadratic_check_is_found() -> None:
    def check(names: list[str]) -> set[str]:
        return {name for name in names if names.count(name) > 1}

    counts = [count_operations(lambda size=size: check([f"n{i}" for i in range(size)])) for size in (100, 200, 400)]
    assert min(ratios(counts)) > MAX_RATIO


def count_objects(value: Any) -> int:
    """The values in JSON data, containers included."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count_objects, children))


def test_a_prepared_request_returns_few_objects(model: PlanningModel) -> None:
    """The event loop's process unpickles what a preparation worker returns."""
    returned = {}
    for case in CASES:
        outcome = outcome_of(model, case, 8 * SMALLEST)
        exclude = READ_LATER if case.endpoint in GENERATING else None
        if isinstance(outcome, PreparedRequest):
            num_objects = count_objects(outcome.body.model_dump(exclude=exclude))
            if num_objects > MAX_RETURNED:
                returned[f"{case.endpoint}: {case.field}"] = num_objects
    assert returned == {}
