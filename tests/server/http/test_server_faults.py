"""Clients that disconnect, invalid requests and an engine that dies do not disturb other requests."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from support.running_server import RunningServer, completion_body
from support.waiting import wait_for


def test_disconnecting_removes_a_waiting_request_from_the_queue(tiny_server: RunningServer) -> None:
    answers: list[httpx.Response] = []
    first = threading.Thread(target=lambda: answers.append(tiny_server.post("/v1/completions", completion_body(40))))
    with tiny_server.hold_steps():
        first.start()
        wait_for(lambda: tiny_server.llm.num_unfinished == 1)
        waiting = tiny_server.send("/v1/completions", completion_body(200, stream=True))
        wait_for(lambda: tiny_server.llm.num_unfinished == 2)
        waiting.close()
        wait_for(lambda: tiny_server.llm.num_unfinished == 1)
    first.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 40
    tiny_server.wait_until_idle()


def test_an_invalid_request_does_not_disturb_a_running_one(tiny_server: RunningServer) -> None:
    tiny_server.slow_down(0.005)
    alone = tiny_server.post("/v1/completions", completion_body(60, logprobs=0)).json()["choices"][0]["logprobs"]
    chunks: list[str] = []
    with httpx.stream(
        "POST", f"{tiny_server.url}/v1/completions", json=completion_body(60, stream=True, logprobs=0)
    ) as response:
        for line in response.iter_lines():
            chunks.append(line)
            if len(chunks) < 12:
                bad = tiny_server.post("/v1/completions", completion_body(3, temperature=-1))
                assert bad.status_code == 400
                assert tiny_server.post("/v1/completions", completion_body(3, prompt=[9999])).status_code == 400
                assert tiny_server.post("/v1/completions", completion_body(3, prompt=[5] * 999)).status_code == 400
    assert chunks[-2] == "data: [DONE]"
    streamed = [
        logprob
        for line in chunks
        if line.startswith("data: {")
        for choice in json.loads(line[6:])["choices"]
        if choice["logprobs"]
        for logprob in choice["logprobs"]["token_logprobs"]
    ]
    assert len(streamed) == 60
    assert streamed == pytest.approx(alone["token_logprobs"], abs=1e-4)


def test_streams_and_calls_end_with_an_error_when_the_engine_dies(tiny_server: RunningServer) -> None:
    results: list[Any] = []

    def call() -> None:
        results.append(tiny_server.post("/v1/completions", completion_body(200)))

    def broken(_output: Any) -> Any:
        raise RuntimeError("device lost")

    caller = threading.Thread(target=call)
    body = completion_body(200, stream=True)
    gate = tiny_server.hold_steps()
    gate.allow(2)
    with httpx.stream("POST", f"{tiny_server.url}/v1/completions", json=body) as response:
        caller.start()
        wait_for(lambda: tiny_server.llm.num_unfinished == 2)
        tiny_server.llm.engine.core._executor.submit = broken  # type: ignore[method-assign]
        gate.open()
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    caller.join()
    assert "device lost" in events[-1]["error"]["message"]
    assert results[0].status_code == 503
    assert httpx.get(f"{tiny_server.url}/health").status_code == 503
    client = tiny_server.client()
    with pytest.raises(openai.InternalServerError, match="device lost"):
        client.completions.create(model="tiny", prompt=[3], max_tokens=2)
