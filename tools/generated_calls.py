"""Calls that schemathesis generates from a server's OpenAPI: each is answered in time, as in the schema, without a 500.

Half of the bodies are generated from the schema alone, and a server rejects nearly all of them. The other half are
valid bodies with a few of the generated fields, which reach more of the code.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tools.fuzz_targets import damaged, deep

SERVER_OPTIONS: dict[str, Any] = {"num_kv_blocks": 24, "max_model_len": 96, "max_num_seqs": 4}
ANSWER_TIMEOUT_SECONDS = 60.0
ENDLESS = ("/v1/events",)
"""Streams that continue until the client disconnects."""

MESSAGES = [{"role": "user", "content": "one two"}]
VALID_BODIES: dict[str, dict[str, Any]] = {
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
    """The number of calls for each (operation, status), and the duration of the slowest call in seconds."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    slowest: float = 0.0

    @property
    def num_cases(self) -> int:
        return sum(self.statuses.values())

    def add(self, operation: str, response: Any) -> None:
        self.statuses[operation, response.status_code] += 1
        self.slowest = max(self.slowest, response.elapsed)


def fuzz_api(url: str, num_cases: int, run_seed: int, outcome: Outcome | None = None) -> Outcome:
    """Make about `num_cases` calls to the server at `url`, most of them to endpoints that generate.

    Args:
        outcome: the outcome of earlier calls, to which these are added.

    Raises:
        Exception: A call failed a check.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", timeout=ANSWER_TIMEOUT_SECONDS)
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    shares = {op.label: _share(op) for op in operations if op.path not in ENDLESS}
    total = sum(shares.values())
    outcome = Outcome() if outcome is None else outcome
    with requests.Session() as session:
        for operation in operations:
            if operation.label in shares:
                count = max(2, round(num_cases * shares[operation.label] / total))
                _fuzz_operation(operation, count, run_seed, session, outcome)
    return outcome


def _share(operation: Any) -> int:
    if operation.path in VALID_BODIES:
        return 8
    return 2 if "{" in operation.path else 1


def _fuzz_operation(operation: Any, count: int, run_seed: int, session: Any, outcome: Outcome) -> None:
    kinds = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]
    valid = VALID_BODIES.get(operation.path)

    @seed(run_seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(kinds), uses_valid_body=st.booleans(), data=st.data())
    def run(case: Any, uses_valid_body: bool, data: st.DataObject) -> None:
        if valid is not None and uses_valid_body and isinstance(case.body, dict):
            names = data.draw(st.lists(st.sampled_from(sorted(case.body) or ["model"]), max_size=3, unique=True))
            case.body = {**valid, **{name: case.body[name] for name in names if name in case.body}}
        if uses_valid_body and "model" in (case.path_parameters or {}):
            case.path_parameters = {"model": "tiny"}
        response = case.call(session=session, timeout=ANSWER_TIMEOUT_SECONDS)
        outcome.add(operation.label, response)
        case.validate_response(response, checks=CHECKS)

    run()


def fuzz_bodies(url: str, num_cases: int, run_seed: int) -> Counter[int]:
    """Send damaged and invalid JSON to all endpoints with a body, and return the number of answers with each status."""
    statuses: Counter[int] = Counter()
    wholes = [json.dumps(body).encode() for body in VALID_BODIES.values()]
    unusual = [
        *deep(),
        b"",
        b"\xff",
        b"[]",
        b"null",
        b'{"prompt": "\\ud800"}',
        b'{"max_tokens": 1' + b"0" * 5000 + b"}",
    ]
    bodies = damaged(wholes) | st.sampled_from(unusual) | st.binary(max_size=50)

    @seed(run_seed)
    @settings(max_examples=num_cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(path=st.sampled_from(sorted(VALID_BODIES)), body=bodies)
    @example(path=next(iter(VALID_BODIES)), body=wholes[0])
    def run(path: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        response = session.post(f"{url}{path}", data=body, headers=headers, timeout=ANSWER_TIMEOUT_SECONDS)
        assert response.status_code < 500, response.text
        assert "error" in response.json() or response.status_code == 200
        statuses[response.status_code] += 1

    with requests.Session() as session:
        run()
    return statuses
