"""An engine that is killed under load is restarted: calls with output fail, and waiting requests are answered."""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift import AsyncLLM
from chairlift.engine.process import restart_policy
from support.plain_http import NO_TLS
from support.process_engines import FAKE_ENGINE, faulty, started, tiny_config
from support.running_server import RunningServer, completion_body, run_server
from support.tiny_engine import tiny_options
from support.waiting import AMPLE_SECONDS, wait_for

NUM_STREAMS = 32
NUM_SEATS = 12
NUM_TOKENS = 36
LAST_STEP = 30
"""The step in which the engine hangs until it is killed, before any stream is complete."""


def stream(server: RunningServer, prompt: list[int], begun: threading.Event | None = None) -> list[dict[str, Any]]:
    """Read the events of a stream, and check its last line."""
    fields = completion_body(NUM_TOKENS, prompt=prompt, stream=True, return_token_ids=True)
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=fields, timeout=AMPLE_SECONDS, verify=NO_TLS
    ) as response:
        assert response.status_code == 200
        lines = []
        for line in response.iter_lines():
            if begun is not None and line.startswith("data: "):  # and not a ping
                begun.set()
            lines.append(line)
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(part) for part in data[:-1]]


def test_the_engine_is_killed_under_a_call_and_32_streams(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_BACKOFF", 0.01)
    config = tiny_config(tiny_model_dir("llama"), max_num_seqs=NUM_SEATS)
    client = started(config, faulty("once-hang", LAST_STEP, tmp_path, is_fake=True))
    hold = tmp_path / "hold"
    hold.touch()
    with run_server(AsyncLLM(client=client), "tiny") as server, ThreadPoolExecutor(1) as pool:
        call = pool.submit(server.post, "/v1/completions", completion_body(NUM_TOKENS))
        wait_for(lambda: server.llm.num_unfinished == 1)
        ended: list[list[dict[str, Any]]] = []
        begun = [threading.Event() for _ in range(NUM_STREAMS)]

        def run(number: int) -> None:
            ended.append(stream(server, [5, 6, 7 + number], begun[number]))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.llm.num_unfinished == NUM_STREAMS + 1)
        hold.unlink()
        wait_for((tmp_path / "broken-once").exists)  # The engine hangs, so its state no longer changes.
        wait_for(lambda: sum(event.is_set() for event in begun) == NUM_SEATS - 1)
        assert server.llm.num_unfinished == NUM_STREAMS + 1
        os.kill(client.engine_pid, signal.SIGKILL)
        wait_for(lambda: server.llm.status().state == "restarting" or server.llm.status().restarts > 0)
        for thread in threads:
            thread.join()
        lost = [events for events in ended if "error" in events[-1]]
        assert len(ended) == NUM_STREAMS
        assert len(lost) == NUM_SEATS - 1
        assert call.result().status_code == 503
        for error in (call.result().json()["error"], *(events[-1]["error"] for events in lost)):
            assert error["type"] == "service_unavailable_error"
            assert "SIGKILL" in error["message"]
        answered = [events for events in ended if events not in lost]
        for events in answered:
            assert sum(len(event["choices"][0]["token_ids"]) for event in events) == NUM_TOKENS
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.llm.status().restarts == 1
        assert server.post("/v1/completions", completion_body(3)).json()["usage"]["completion_tokens"] == 3


def test_calls_fail_with_the_reason_while_the_model_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine computes no model, and reads only its configuration."""
    for name, seconds in (("FIRST_BACKOFF", 0.01), ("LONGEST_BACKOFF", 0.2), ("MAX_WAIT_SECONDS", 0.5)):
        monkeypatch.setattr(restart_policy, name, seconds)
    folder, file = tmp_path / "model", tmp_path / "model" / "config.json"
    tiny_options(folder)
    client = started(tiny_config(folder, max_num_seqs=8), FAKE_ENGINE)
    may_start = tmp_path / "may start"
    waits = f"until test -e '{may_start}'; do sleep 0.02; done; exec {shlex.join(FAKE_ENGINE)}"
    with run_server(AsyncLLM(client=client), "tiny") as server, ThreadPoolExecutor(1) as pool:
        assert get(server, "/health") == (200, {"status": "ok"})
        good = file.read_bytes()
        replace(file, b"junk" * 1000)
        client._command = ("sh", "-c", waits)
        os.kill(client.engine_pid, signal.SIGKILL)
        wait_for(lambda: server.llm.status().state == "restarting")
        waiting = pool.submit(server.post, "/v1/completions", completion_body(3))
        assert get(server, "/health") == (200, {"status": "restarting", "reason": "SIGKILL: out of memory?"})
        status, ready = get(server, "/ready")
        assert (status, ready["state"]) == (503, "restarting")
        may_start.touch()
        check_unavailable(waiting.result(timeout=AMPLE_SECONDS), file.name)
        check_unavailable(server.post("/v1/completions", completion_body(3)), file.name)
        check_unavailable(server.post("/v1/completions", completion_body(3, stream=True)), file.name)
        assert (unavailable := client.unavailable) is not None
        assert file.name not in unavailable.text(is_admin=False)
        assert str(folder) not in unavailable.text(is_admin=False)
        status, health = get(server, "/health")
        assert (status, health["status"]) == (503, "cannot_restart")
        assert file.name in health["reason"]
        status, ready = get(server, "/ready")
        assert (status, ready["state"]) == (503, "cannot_restart")
        assert "cannot be restarted" in ready["reason"]
        assert get(server, "/v1/engine")[1]["status"]["state"] == "cannot_restart"
        assert "chairlift:engine_cannot_restart{" in metric(server, "1.0")
        replace(file, good)
        wait_for(lambda: server.llm.status().state == "running")
        assert server.post("/v1/completions", completion_body(3)).json()["usage"]["completion_tokens"] == 3
        assert get(server, "/health") == (200, {"status": "ok"})
        assert "chairlift:engine_cannot_restart{" in metric(server, "0.0")


def replace(file: Path, content: bytes) -> None:
    """Replace a file by a new one. Processes that have opened the old file can still read it."""
    file.with_suffix(".new").write_bytes(content)
    file.with_suffix(".new").replace(file)


def get(server: RunningServer, path: str) -> tuple[int, Any]:
    answer = httpx.get(f"{server.url}{path}", verify=NO_TLS)
    return answer.status_code, answer.json()


def metric(server: RunningServer, value: str) -> str:
    """The lines of /metrics with this value."""
    lines = httpx.get(f"{server.url}/metrics", verify=NO_TLS).text.splitlines()
    return "\n".join(line for line in lines if line.endswith(f" {value}"))


def check_unavailable(answer: httpx.Response, file: str) -> None:
    assert answer.status_code == 503, answer.text
    message = answer.json()["error"]["message"]
    assert "the engine cannot be restarted" in message
    assert file in message
    assert "replace it" in message
    assert int(answer.headers["retry-after"]) >= 1
