"""The queue of constraints that are compiled, over HTTP."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chairlift import AsyncLLM
from chairlift.grammar import compiler as grammar_compiler
from chairlift.grammar.checker import GrammarChecker
from chairlift.grammar.compiler import QUICK_SECONDS
from chairlift.server.access.keys import Key, KeyRing, digest
from support.running_server import RunningServer, run_server
from support.waiting import AMPLE_SECONDS, wait_for

KEYS = KeyRing([Key("slow", digest("slow-secret")), Key("simple", digest("simple-secret"))])


@pytest.fixture(scope="module")
def server(api_folder: Path) -> Iterator[RunningServer]:
    with run_server(AsyncLLM(model=str(api_folder), num_kv_blocks=100, num_threads=1), "tiny", keys=KEYS) as running:
        yield running


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set to end the checks of constraints with "slow" in their text."""
    released = threading.Event()

    def seconds_to_compile(_checker: GrammarChecker, text: str, limit: float) -> float:
        if "slow" not in text:
            return 0.001
        if limit <= QUICK_SECONDS:
            return math.inf
        assert released.wait(AMPLE_SECONDS)
        return 1.0

    monkeypatch.setattr(grammar_compiler, "QUEUE_SECONDS", AMPLE_SECONDS)
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING_PER_TENANT", 3)
    monkeypatch.setattr(GrammarChecker, "start_if_needed", lambda _checker: None)
    monkeypatch.setattr(GrammarChecker, "seconds_to_compile", seconds_to_compile)
    yield released
    released.set()


def body(choice: str) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 20, "temperature": 0, "structured_outputs": {"choice": [choice]}}


def test_the_constraints_of_a_key_delay_no_other_key_and_are_bounded(
    server: RunningServer, release: threading.Event
) -> None:
    compiler = server.llm.engine.input_processor.constraints._compiler()
    with ThreadPoolExecutor(3) as pool:
        slow = [
            pool.submit(server.post, "/v1/completions", body(f"slow {index}"), api_key="slow-secret")
            for index in range(3)
        ]
        wait_for(lambda: compiler._num_waiting["slow"] == 3)
        rejected = server.post("/v1/completions", body("slow 3"), api_key="slow-secret")
        assert (rejected.status_code, rejected.headers["Retry-After"]) == (429, "5")
        assert rejected.json()["error"]["code"] == "grammar_queue_full"
        for index in range(10):
            answer = server.post("/v1/completions", body(f"simple {index}"), api_key="simple-secret")
            assert answer.json()["choices"][0]["text"] == f"simple {index}"
        assert not any(call.done() for call in slow)
        release.set()
    assert [call.result().status_code for call in slow] == [200] * 3


def test_a_client_that_leaves_gives_up_its_place(server: RunningServer, release: threading.Event) -> None:
    compiler = server.llm.engine.input_processor.constraints._compiler()
    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(server.post, "/v1/completions", body("slow stays"), api_key="slow-secret")
        wait_for(lambda: compiler._num_waiting["slow"] == 1)
        leaving = server.send("/v1/completions", body("slow leaves"), api_key="slow-secret")
        wait_for(lambda: compiler._num_waiting["slow"] == 2)
        leaving.close()
        wait_for(lambda: compiler._num_waiting["slow"] == 1)
        release.set()
    assert staying.result().status_code == 200
