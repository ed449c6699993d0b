"""Tests of the terminal application with textual's pilot."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import DataTable, Static

from chairlift import AsyncLLM
from chairlift.errors import ConfigError
from chairlift.observability.top import (
    KINDS,
    CounterRate,
    HttpSource,
    Snapshot,
    SourceError,
    TopApp,
    count_of,
    explained_lines,
    memory_bar,
    shares,
    status_line,
)
from running_server import RunningServer, run_server


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
        self.is_closed = False

    async def snapshot(self) -> Snapshot:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, SourceError):
            raise answer
        return answer

    async def explain(self, request_id: str) -> list[str]:
        return [f"why {request_id} waits"]

    async def close(self) -> None:
        self.is_closed = True


BUSY = Snapshot(engine(), [sequence("a~1", "running"), sequence("b~2", "waiting", "seats")])


def shown(app: TopApp, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


def test_engine_memory_and_requests_are_shown() -> None:
    async def look() -> None:
        app = TopApp(source, 60)
        async with app.run_test(size=(120, 30)) as pilot:
            await pilot.pause()
            assert "tiny: running   continuous/paged   1 running, 1 waiting" in shown(app, "status")
            assert "b~2 waits for seats" in shown(app, "status")
            assert "token_states 60 (60%)" in shown(app, "memory")
            table = app.query_one(DataTable)
            assert [table.get_row_at(i)[:3] for i in range(2)] == [["a~1", "running", ""], ["b~2", "waiting", "seats"]]
            await pilot.press("q")

    source = FakeSource(BUSY)
    asyncio.run(look())
    assert source.is_closed


def test_enter_explains_a_request_and_escape_closes_it() -> None:
    async def look() -> None:
        app = TopApp(FakeSource(BUSY), 60)
        async with app.run_test() as pilot:
            await pilot.press("down", "enter")
            await pilot.pause()
            assert "why b~2 waits" in shown(app, "why")
            await pilot.press("escape")
            assert "why b~2 waits" not in shown(app, "why")

    asyncio.run(look())


def test_a_disconnected_server_is_shown_and_reconnected() -> None:
    async def look() -> None:
        app = TopApp(FakeSource(SourceError("connection refused"), BUSY), 60)
        async with app.run_test() as pilot:
            await pilot.pause()
            assert shown(app, "status") == "connection refused"
            await app.refresh_view()
            assert "tiny: running" in shown(app, "status")

    asyncio.run(look())


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
    assert all(abs(found[kind] - slots[kind] * width / total) < 1 for kind in KINDS)


def test_an_invalid_url_is_rejected() -> None:
    with pytest.raises(ConfigError, match="url must begin with http"):
        HttpSource("localhost:8000")


@pytest.fixture
def busy_server(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    options = {"num_kv_blocks": 60, "skip_tokenizer_init": True, "num_threads": 1, "max_num_seqs": 1}
    with run_server(AsyncLLM(model=str(tiny_model_dir("llama")), **options), "tiny") as running:
        running.slow_down(0.02)
        yield running


def test_top_shows_a_real_server(busy_server: RunningServer) -> None:
    body = {"prompt": [3, 4, 5], "max_tokens": 80, "ignore_eos": True}
    callers = [
        threading.Thread(target=busy_server.post, args=("/v1/completions", {**body, "request_id": name}))
        for name in ("first", "second")
    ]

    async def look() -> None:
        app = TopApp(HttpSource(f"{busy_server.url}/v1"), 0.1)
        async with app.run_test(size=(160, 30)) as pilot:
            for caller in callers:
                caller.start()
            while app.query_one(DataTable).row_count < 2:
                await pilot.pause(0.05)
            await pilot.press("down", "enter")
            while "seats: the only seat is taken" not in shown(app, "why"):
                await pilot.pause(0.05)
            assert "max_num_seqs=2 would have admitted it" in shown(app, "why")
            assert "output tokens/s" in shown(app, "status")

    asyncio.run(asyncio.wait_for(look(), 20))
    for caller in callers:
        caller.join()


def test_without_a_terminal_there_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chairlift", "top"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "needs a terminal: read /metrics or /v1/engine" in done.stderr


def test_the_expected_wait_is_shown_or_unknown() -> None:
    waiting = {"waits": [], "would_admit": [], "position": 2, "expected_wait": None}
    assert explained_lines(waiting) == ["requests ahead: 2; estimated wait: unknown"]
    assert explained_lines({**waiting, "expected_wait": 1.25}) == ["requests ahead: 2; estimated wait: 1.2 s"]
    assert explained_lines({**waiting, "expected_wait": 130.0}) == ["requests ahead: 2; estimated wait: 130.0 s"]
    assert explained_lines({**waiting, "position": None}) == []
