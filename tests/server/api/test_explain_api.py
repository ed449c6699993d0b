"""Tests the endpoints that show the requests and the state of a running server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from chairlift import AsyncLLM
from chairlift.events import from_json
from chairlift.sampling_params import SamplingParams
from chairlift.server.api import requests
from chairlift.server.api.requests import MAX_EXPLAINED
from support.plain_http import NO_TLS
from support.running_server import RunningServer, run_server
from support.waiting import AMPLE_SECONDS, wait_for

EACH_API = pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": [3], "max_tokens": 2}),
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ("responses", {"input": "Hi", "max_output_tokens": 2}),
        ("messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    ],
    ids=["completions", "chat", "responses", "messages"],
)


@dataclass(frozen=True)
class Shown:
    replica: str = ""


@pytest.fixture(scope="module")
def tight(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    """A server with reserved memory for two requests of 40 slots, and slow steps so that requests wait."""
    llm = AsyncLLM(
        model=str(tiny_model_dir("llama")),
        num_kv_blocks=8,
        kv="exact",
        kv_arena="first-fit",
        max_model_len=64,
        skip_tokenizer_init=True,
        num_threads=1,
        max_num_seqs=4,
    )
    with run_server(llm, "tiny") as running:
        running.slow_down(0.005)
        yield running


def ask(server: RunningServer, name: str, prompt: int = 10, max_tokens: int = 30) -> httpx.Response:
    body = {"prompt": [3] * prompt, "max_tokens": max_tokens, "ignore_eos": True, "request_id": name}
    return server.post("/v1/completions", body)


def crowd(server: RunningServer, prefix: str, count: int = 4) -> list[str]:
    """Make calls that are all in the queue before the first one is scheduled."""
    with ThreadPoolExecutor(count) as pool:
        with server.hold_steps():
            calls = [pool.submit(ask, server, f"{prefix}{index}") for index in range(count)]
            wait_for(lambda: server.llm.num_unfinished == count)
        answers = [call.result() for call in calls]
    assert [answer.status_code for answer in answers] == [200] * count
    return [answer.json()["id"] for answer in answers]


def get(server: RunningServer, path: str) -> Any:
    answer = httpx.get(f"{server.url}{path}", verify=NO_TLS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_other_calls_have_their_turn_while_requests_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_view", lambda each: each)
    turns: list[int] = []

    async def list_twice() -> None:
        turn = asyncio.Lock()
        found: list[Any] = [*range(10 * requests.VIEWS_PER_TURN)]
        lists = [asyncio.create_task(requests._views(found, turn)) for _ in range(2)]
        while not all(each.done() for each in lists):
            turns.append(1)
            await asyncio.sleep(0)
        assert [each.result() for each in lists] == [found] * 2

    asyncio.run(list_twice())
    assert len(turns) >= 20


def test_one_explanation_at_a_time_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads would compete with the event loop for Python's lock."""
    gate, started = threading.Event(), list[int]()

    def what_ifs(_: object) -> list[object]:
        started.append(1)
        assert gate.wait(AMPLE_SECONDS)
        return []

    async def explain_often() -> int:
        explainer = Mock(explain=lambda *_: Shown())
        found: list[Any] = [SimpleNamespace(observer=Mock(explainer=explainer), request=None)]
        tasks = [asyncio.create_task(requests._explain(found, Mock())) for _ in range(5)]
        while not started:
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
        num_started = len(started)
        gate.set()
        await asyncio.gather(*tasks)
        return num_started

    monkeypatch.setattr(requests, "what_ifs", what_ifs)
    assert asyncio.run(explain_often()) == 1
    assert len(started) == 5


def test_a_request_is_shown_with_its_timings(tight: RunningServer) -> None:
    answer = ask(tight, "alone")
    (shown,) = get(tight, f"/v1/requests/{answer.json()['id']}")["sequences"]
    assert (shown["state"], shown["finish_reason"]) == ("finished", "length")
    assert (shown["num_prompt_tokens"], shown["num_output_tokens"], shown["max_tokens"]) == (10, 30, 30)
    times = shown["timings"]
    assert 0 <= times["queue_time"] <= times["time_to_first_token"] <= times["last_token"] <= times["age"]
    assert times["time_per_output_token"] == pytest.approx((times["last_token"] - times["time_to_first_token"]) / 29)


def test_a_wait_for_memory_is_explained_with_block_counts(tight: RunningServer) -> None:
    waited = []
    for call in crowd(tight, "crowd"):
        (explained,) = get(tight, f"/v1/requests/{call}/explain")["sequences"]
        (wait,) = explained["waits"]
        spans = wait["spans"]
        assert spans[0]["start"] == 0
        assert [span["start"] for span in spans[1:]] == [span["end"] for span in spans[:-1]]
        assert spans[-1]["end"] == explained["queue_time"] == explained["contention"]["queue_time"]
        waited += [(explained, span) for span in spans if span["reason"] == "memory"]
    assert waited
    explained, span = next((e, s) for e, s in waited if s["is_head"])
    assert (span["needed_blocks"], span["num_running"], len(span["largest_holders"])) == (3, 2, 2)
    assert (span["free_blocks"], span["largest_holders"][0]["num_blocks"]) == (2, 3)
    assert "needs 3 blocks, 2 are free" in span["text"]
    ways = {json.dumps(way["changes"]): way["admits"] for way in explained["would_admit"]}
    assert ways == {'{"num_kv_blocks": 9}': True, '{"max_tokens": 23}': True}


def test_an_unknown_request_is_a_404(tight: RunningServer) -> None:
    for path in ("/v1/requests/unknown", "/v1/requests/unknown/explain"):
        answer = httpx.get(tight.url + path)
        assert answer.status_code == 404
        assert "'unknown' is not known" in answer.json()["error"]["message"]


def test_several_prompts_and_answers_are_found_under_their_call(tight: RunningServer) -> None:
    body = {"prompt": [[3, 4], [5, 6]], "max_tokens": 2, "n": 2, "seed": 1, "request_id": "many"}
    answer = tight.post("/v1/completions", body).json()
    shown = get(tight, f"/v1/requests/{answer['id']}")["sequences"]
    assert len({sequence["id"] for sequence in shown}) == 4
    assert len(get(tight, f"/v1/requests/{answer['id']}.1")["sequences"]) == 2
    assert get(tight, "/v1/requests")["data"] == []


def test_the_first_sequences_of_a_large_call_are_explained(tight: RunningServer) -> None:
    body = {"prompt": [[3, index] for index in range(20)], "max_tokens": 2, "request_id": "large"}
    assert tight.post("/v1/completions", body).status_code == 200
    explained = get(tight, "/v1/requests/cmpl-large/explain")
    assert explained["num_sequences"] == 20
    ids = [sequence["id"].partition("~")[0] for sequence in explained["sequences"]]
    assert ids == [f"cmpl-large.{index}" for index in range(MAX_EXPLAINED)]


def test_the_engine_shows_configuration_plan_pool_and_accounting(tight: RunningServer) -> None:
    ask(tight, "before")
    engine = get(tight, "/v1/engine")
    assert engine["status"]["state"] == "running"
    assert engine["configuration"]["kv"] == "exact"
    assert engine["plan"]["num_blocks"] == 8
    assert sum(engine["pool"]["slots"].values()) == 8 * 16
    pool, batch = engine["pool"], engine["batch"]
    assert (pool["held_blocks"], pool["free_blocks"], pool["evictable_blocks"]) == (0, 8, 0)
    assert pool["slots"]["free"] == 8 * 16, "the last step's is not what is there now"
    assert (batch["num_running"], batch["num_waiting"], batch["wait_reason"], batch["head"]) == (0, 0, None, None)
    assert batch["step"] > 0
    assert engine["events_dropped"] == 0


def test_events_are_streamed_as_they_are_logged(tight: RunningServer) -> None:
    lines: list[str] = []
    connected = threading.Event()

    def read() -> None:
        with httpx.stream("GET", f"{tight.url}/v1/events") as stream:
            for line in stream.iter_lines():
                lines.append(line)
                connected.set()
                if line == "event: request_finished":
                    return

    reader = threading.Thread(target=read)
    reader.start()
    assert connected.wait(AMPLE_SECONDS)
    ask(tight, "watched", max_tokens=3)
    reader.join()
    events = [from_json(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    kinds = [event.type for event in events]
    assert kinds[0] == "engine_started"
    # The last step of an earlier request may be reported after its response.
    assert [kind for kind in kinds if kind != "step"] == ["engine_started", "request_arrived"]
    assert "step" in kinds


def test_ready_and_health(tight: RunningServer) -> None:
    assert get(tight, "/health") == get(tight, "/ping") == {"status": "ok"}, "without a reason that is null"
    assert get(tight, "/ready") == {"status": "ready", "state": "running", "reason": None}


def test_metrics_are_in_prometheus_text(tight: RunningServer) -> None:
    ask(tight, "measured", max_tokens=3)
    answer = httpx.get(f"{tight.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert "vllm:num_requests_running{" in answer.text
    assert 'vllm:request_success_total{engine="0",finished_reason="length"' in answer.text
    assert "chairlift:engine_up{" in answer.text


@EACH_API
def test_the_slo_of_a_request_is_explained(api_server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    answer = api_server.post(f"/v1/{path}", {"model": "tiny", "slo": {"ttft_ms": 80_000_000, "tpot_ms": 5e7}, **fields})
    assert answer.status_code == 200, answer.text
    (sequence,) = get(api_server, f"/v1/requests/{answer.json()['id']}/explain")["sequences"]
    assert sequence["slo"]["is_met"] is True
    assert (sequence["slo"]["ttft_ms"], sequence["slo"]["tpot_ms"]) == (80_000_000, 5e7)
    rejected = api_server.post(f"/v1/{path}", {"model": "tiny", "slo": {"ttft_ms": -1}, **fields})
    assert rejected.status_code == 400
    assert "slo.ttft_ms must be a number of milliseconds above 0" in rejected.text


@EACH_API
@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_engine_knows_whether_an_answer_is_streamed(
    api_server: RunningServer, path: str, fields: dict[str, Any], is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = [], api_server.llm.start

    def record(text: Any, token_ids: Any, params: SamplingParams, **options: Any) -> Any:
        started.append(params.is_streamed)
        return start(text, token_ids, params, **options)

    monkeypatch.setattr(api_server.llm, "start", record)
    answer = api_server.post(f"/v1/{path}", {"model": "tiny", "stream": is_streamed, **fields})
    assert answer.status_code == 200, answer.text
    assert started == [is_streamed]
