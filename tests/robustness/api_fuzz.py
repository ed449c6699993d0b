"""schemathesis against a running server, by the server's own OpenAPI: no 500, no answer that does not come, and
statuses and bodies that the schema knows.

Half of the bodies are what schemathesis makes of the schema alone, nearly all of which a server refuses. The other half
are a few fields of those laid over a body that is right, so that what is odd about them gets as far as it can.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from fuzzing import damaged, deep
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

SERVER_OPTIONS: dict[str, Any] = {"num_kv_blocks": 24, "max_model_len": 96, "max_num_seqs": 4}
SECONDS_AN_ANSWER = 20.0
ENDLESS = ("/v1/events",)
"""Streams that go on until their reader leaves."""

MESSAGES = [{"role": "user", "content": "one two"}]
RIGHT_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [3, 4, 5], "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "one two", "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3, "model": "tiny"},
    "/tokenize": {"prompt": "one two"},
    "/detokenize": {"tokens": [3, 4, 5]},
}
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


@dataclass(slots=True)
class Outcome:
    """How the calls ended: (operation, status) -> count; and the slowest one, in seconds."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    slowest: float = 0.0

    @property
    def num_cases(self) -> int:
        return sum(self.statuses.values())

    def note(self, operation: str, response: Any) -> None:
        self.statuses[operation, response.status_code] += 1
        self.slowest = max(self.slowest, response.elapsed)


def fuzz_api(url: str, num_cases: int, run_seed: int, outcome: Outcome | None = None) -> Outcome:
    """About so many calls to the server at `url`, most of them to what generates; raises at the first that ends badly.

    Args:
        outcome: of calls before, to be added to.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    shares = {op.label: _share(op) for op in operations if op.path not in ENDLESS}
    total = sum(shares.values())
    outcome = Outcome() if outcome is None else outcome
    with requests.Session() as session:
        for operation in operations:
            if operation.label in shares:
                count = max(4, round(num_cases * shares[operation.label] / total))
                _fuzz_operation(operation, count, run_seed, session, outcome)
    return outcome


def _share(operation: Any) -> int:
    if operation.path in RIGHT_BODIES:
        return 8
    return 2 if "{" in operation.path else 1


def _fuzz_operation(operation: Any, count: int, run_seed: int, session: Any, outcome: Outcome) -> None:
    kinds = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]
    right = RIGHT_BODIES.get(operation.path)

    @seed(run_seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(kinds), is_laid_over=st.booleans(), data=st.data())
    def run(case: Any, is_laid_over: bool, data: st.DataObject) -> None:
        if right is not None and is_laid_over and isinstance(case.body, dict):
            names = data.draw(st.lists(st.sampled_from(sorted(case.body) or ["model"]), max_size=3, unique=True))
            case.body = {**right, **{name: case.body[name] for name in names if name in case.body}}
        if is_laid_over and "model" in (case.path_parameters or {}):
            case.path_parameters = {"model": "tiny"}
        response = case.call(session=session, timeout=SECONDS_AN_ANSWER)
        outcome.note(operation.label, response)
        case.validate_response(response, checks=CHECKS)

    run()


def fuzz_bodies(url: str, num_cases: int, run_seed: int) -> Counter[int]:
    """Bodies that are no JSON, or hardly, to everything that takes one; returns how often each status came."""
    statuses: Counter[int] = Counter()
    wholes = [json.dumps(body).encode() for body in RIGHT_BODIES.values()]
    odd = [*deep(), b"", b"\xff", b"[]", b"null", b'{"prompt": "\\ud800"}', b'{"max_tokens": 1' + b"0" * 5000 + b"}"]
    bodies = damaged(wholes) | st.sampled_from(odd) | st.binary(max_size=50)

    @seed(run_seed)
    @settings(max_examples=num_cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(path=st.sampled_from(sorted(RIGHT_BODIES)), body=bodies)
    def run(path: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        response = session.post(f"{url}{path}", data=body, headers=headers, timeout=SECONDS_AN_ANSWER)
        assert response.status_code < 500, response.text
        assert "error" in response.json() or response.status_code == 200
        statuses[response.status_code] += 1

    with requests.Session() as session:
        run()
    return statuses
