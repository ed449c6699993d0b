"""Tests of what `chairlift top` shows."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from chairlift import AsyncLLM
from chairlift.errors import ConfigError
from chairlift.observability.top import (
    KINDS,
    CounterRate,
    HttpSource,
    Snapshot,
    SourceError,
    TopView,
    count_of,
    explained_lines,
    memory_bar,
    shares,
    status_line,
)
from support.running_server import RunningServer, run_server
from support.waiting import wait_for


def engine(step: int = 7, **changes: Any) -> dict[str, Any]:
    return {
        "configuration": {"model": "tiny", "batching": "continuous", "kv": "paged"},
        "status": {"state": "running", "restarts": 0, "num_unfinished": 2},
        "pool": {"slots": {"token_states": 60, "reserved": 10, "internal": 0, "external": 0, "free": 30}},
        "batch": {
            "step": step, "num_running": 1, "num_waiting": 1, "num_tokens": 3, "wait_reason": "seats", "head": "b~2"
        },
        **changes,
    }  # fmt: skip


def sequence(name: str, state: str, wait_reason: str | None = None) -> dict[str, Any]:
    timings = {"queue_time": None if wait_reason else 0.25, "age": 3.0}
    counts = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "max_tokens", "num_blocks")
    return {
        "id": name, "state": state, "wait_reason": wait_reason, "timings": timings, "num_preemptions": 0,
        **dict.fromkeys(counts, 4),
    }  # fmt: skip


class FakeSource:
    """Returns the given snapshots and errors in order, and then repeats the last one."""

    def __init__(self, *answers: Snapshot | SourceError) -> None:
        self._answers = list(answers)

    def snapshot(self) -> Snapshot:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, SourceError):
            raise answer
        return answer

    def explain(self, request_id: str) -> list[str]:
        return [f"why {request_id} waits"]


BUSY = Snapshot(engine(), [sequence("a~1", "running"), sequence("b~2", "waiting", "seats")])


def shown(view: TopView, width: int = 120) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(view.read(width))
    return out.getvalue()


def test_engine_memory_and_requests_are_shown() -> None:
    lines = shown(TopView(FakeSource(BUSY))).splitlines()
    assert lines[0].startswith("tiny: running   continuous/paged   1 running, 1 waiting")
    assert "b~2 waits for seats" in lines[0]
    assert "token_states 60 (60%)" in lines[2]
    assert [line.split()[:2] for line in lines[-2:]] == [["a~1", "running"], ["b~2", "waiting"]]


def test_the_head_of_a_blocked_queue_or_a_chosen_request_is_explained() -> None:
    assert "why b~2 waits" in shown(TopView(FakeSource(BUSY)))
    assert "why a~1 waits" in shown(TopView(FakeSource(BUSY), "a~1"))
    batch = {**engine()["batch"], "wait_reason": None, "head": None}
    assert "why" not in shown(TopView(FakeSource(Snapshot(engine(batch=batch), []))))


def test_a_disconnected_server_is_shown_and_reconnected() -> None:
    view = TopView(FakeSource(SourceError("connection refused"), BUSY))
    assert shown(view).strip() == "connection refused"
    assert "tiny: running" in shown(view)


def test_rates_are_those_between_two_snapshots_of_one_server() -> None:
    rate = CounterRate()
    found = [rate.update(now, value) for now, value in ((0, 0.0), (1, 40.0), (3, 60.0), (4, 3.0), (5, 23.0))]
    assert found == [None, 40, 10, None, 20]
    text = '# HELP vllm:generation_tokens_total x\nvllm:generation_tokens_total{model="a"} 7.0\nother_total 9.0\n'
    assert count_of("vllm:generation_tokens_total", text) == 7


def test_an_idle_engine_shows_free_memory() -> None:
    idle = engine(status={"state": "running", "restarts": 0, "num_unfinished": 0})
    assert status_line(idle, None, None) == "tiny: running   continuous/paged   idle after step 7"
    assert "token_states 0 (0%)" in memory_bar(idle, 40).plain
    assert "free 100 (100%)" in memory_bar(idle, 40).plain


@given(st.dictionaries(st.sampled_from(list(KINDS)), st.integers(0, 10_000)), st.integers(1, 300))
def test_the_memory_bar_fills_its_width(slots: dict[str, int], width: int) -> None:
    slots = {kind: slots.get(kind, 0) for kind in KINDS} | {"free": slots.get("free", 0) + 1}
    found = shares(slots, width)
    assert sum(found.values()) == width
    total = sum(slots.values())
    assert all(abs(found[kind] * total - slots[kind] * width) <= total for kind in KINDS)


def test_an_invalid_url_is_rejected() -> None:
    with pytest.raises(ConfigError, match="url must begin with http"):
        HttpSource("localhost:8000")
    with pytest.raises(ConfigError, match="url is invalid"):
        HttpSource("http://[::1")


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, "<html>", "the response is not JSON with '.*': is this a server of Chairlift"),
        (200, '{"error": "not found"}', "the response is not JSON with '.*': is this a server of Chairlift"),
        (200, "[1]", "the response is not JSON with '.*': is this a server of Chairlift"),
        (401, '{"error": {"message": "the API key is not known"}}', ": the API key is not known$"),
        (403, "{}", "needs an admin key: set --api-key"),
        (500, "<html>", ": the server answered with status 500"),
    ],
)
def test_a_response_of_another_server_is_explained(
    status: int, body: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(_client: httpx.Client, request: httpx.Request, **_options: object) -> httpx.Response:
        return httpx.Response(status, text=body, request=request)

    monkeypatch.setattr(httpx.Client, "send", answer)
    source = HttpSource("http://localhost", "schlüssel")
    with pytest.raises(SourceError, match=f"/v1/engine.*{problem}"):
        source.snapshot()
    with pytest.raises(SourceError, match=f"/v1/requests/a/explain.*{problem}"):
        source.explain("a")


@pytest.fixture
def busy_server(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    options = {"num_kv_blocks": 60, "skip_tokenizer_init": True, "num_threads": 1, "max_num_seqs": 1}
    with run_server(AsyncLLM(model=str(tiny_model_dir("llama")), **options), "tiny") as running:
        yield running


def test_top_shows_a_real_server(busy_server: RunningServer) -> None:
    body = {"prompt": [3, 4, 5], "max_tokens": 80, "ignore_eos": True}
    callers = [
        threading.Thread(target=busy_server.post, args=("/v1/completions", {**body, "request_id": name}))
        for name in ("first", "second")
    ]

    source = HttpSource(f"{busy_server.url}/v1")
    view = TopView(source)
    with busy_server.hold_steps() as gate:
        for caller in callers:
            caller.start()
        wait_for(lambda: busy_server.llm.num_unfinished == 2)
        gate.allow(5)
        wait_for(lambda: "output tokens/s" in shown(view, 200))  # The second one waits in these steps.
        wait_for(lambda: "seats: the only seat is taken" in shown(view, 200))
        for name in ("cmpl-first", "cmpl-second"):  # the ids in the responses, without the number of a sequence
            assert [line[: len(name) + 1] for line in source.explain(name) if line.startswith("cmpl")] == [f"{name}~"]
    for caller in callers:
        caller.join()


def test_a_request_that_the_server_does_not_have(busy_server: RunningServer) -> None:
    assert "The server has no request gone." in shown(TopView(HttpSource(busy_server.url), "gone"))


def test_without_a_terminal_there_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chairlift", "top"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "needs a terminal: read /metrics or /v1/engine" in done.stderr


def test_the_expected_wait_is_shown_or_unknown() -> None:
    waiting = {"waits": [], "would_admit": [], "position": 2, "expected_wait": None}
    assert explained_lines(waiting) == ["requests ahead: 2; estimated wait: unknown"]
    assert explained_lines({**waiting, "expected_wait": 1.25}) == ["requests ahead: 2; estimated wait: 1.2 s"]
    assert explained_lines({**waiting, "expected_wait": 130.0}) == ["requests ahead: 2; estimated wait: 130.0 s"]
    assert explained_lines({**waiting, "position": None}) == []
