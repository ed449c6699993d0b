"""Draining: accepted calls are answered after a signal, and new calls are rejected."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from chairlift import AsyncLLM
from chairlift.server import draining_server
from chairlift.server.access.access_options import ServerLimits
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.keys import ANONYMOUS
from chairlift.server.draining_server import FORCED_STOP_SECONDS, STOP_SECONDS, WATCHDOG_SECONDS, DrainingServer
from chairlift.server.http.http_protocol import uvicorn_config
from support.plain_http import NO_TLS
from support.running_server import RunningServer, completion_body, run_server
from support.waiting import AMPLE_SECONDS, wait_for

FAKE_SERVER = str(Path(__file__).parents[1] / "robustness" / "stuck_server.py")
"""`chairlift serve` with an engine that computes no model, whose step takes 2 ms."""


def num_tokens(line: str) -> int:
    """The number of tokens in one event, which may be several if its reader is slow."""
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return sum(len(choice["logprobs"]["token_logprobs"]) for choice in choices if choice["logprobs"])


@pytest.fixture
def draining(
    request: pytest.FixtureRequest, tiny_llm: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningServer]:
    """A server whose drain_timeout is the parameter, and which has ample time to send its responses after it."""
    for name in ("STOP_SECONDS", "FORCED_STOP_SECONDS"):
        monkeypatch.setattr(draining_server, name, round(AMPLE_SECONDS))
    with run_server(tiny_llm(max_num_seqs=2), "tiny", limits=ServerLimits(drain_timeout=request.param)) as running:
        yield running


@pytest.mark.parametrize("draining", [120.0], indirect=True)
def test_a_signal_under_load_loses_no_accepted_call(draining: RunningServer) -> None:
    streamed: list[str] = []

    def stream() -> None:
        content = completion_body(40, stream=True, logprobs=0)
        with httpx.stream(
            "POST", f"{draining.url}/v1/completions", json=content, timeout=AMPLE_SECONDS, verify=NO_TLS
        ) as response:
            streamed.extend(line for line in response.iter_lines() if line)

    reader = threading.Thread(target=stream)
    with ThreadPoolExecutor(8) as pool, httpx.Client() as idle:
        assert idle.get(f"{draining.url}/ready").status_code == 200
        with draining.hold_steps():
            reader.start()
            calls = [pool.submit(draining.post, "/v1/completions", completion_body(30)) for _ in range(6)]
            wait_for(lambda: draining.admission.num_calls == 7)
            draining.uvicorn.handle_exit(signal.SIGTERM, None)
            late = draining.post("/v1/completions", completion_body(1))
            ready = idle.get(f"{draining.url}/ready")
        answers = [call.result() for call in calls]
    reader.join()
    assert late.status_code == 503
    assert late.headers["retry-after"] == "120"
    assert late.json()["error"]["code"] == "shutting_down"
    assert ready.status_code == 503
    assert re.search(r"shutting down and has 7 unfinished calls", ready.json()["reason"])
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [30] * 6
    assert streamed[-1] == "data: [DONE]"
    assert sum(num_tokens(line) for line in streamed[:-1]) == 40
    wait_for(lambda: draining.uvicorn.should_exit)


@pytest.mark.parametrize("draining", [0.2], indirect=True)
def test_after_the_drain_timeout_the_remaining_calls_end_with_an_error(draining: RunningServer) -> None:
    with ThreadPoolExecutor(2) as pool, draining.hold_steps():
        call = pool.submit(draining.post, "/v1/completions", completion_body(200))
        wait_for(lambda: draining.admission.num_calls == 1)
        draining.uvicorn.handle_exit(signal.SIGTERM, None)
        answer = call.result()
    assert answer.status_code == 503
    assert "drain_timeout=0.2 s): send it again" in answer.json()["error"]["message"]


@pytest.mark.parametrize("draining", [60.0], indirect=True)
def test_a_second_signal_ends_streams_with_an_error(draining: RunningServer) -> None:
    gate = draining.hold_steps()
    gate.allow(2)
    with (
        gate,
        httpx.stream("POST", f"{draining.url}/v1/completions", json=completion_body(200, stream=True)) as response,
    ):
        wait_for(lambda: draining.llm.num_unfinished == 1)
        for _ in range(2):
            draining.uvicorn.handle_exit(signal.SIGINT, None)
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert "(it received a second signal): send it again" in events[-1]["error"]["message"]


class RecordingEngine:
    """An engine that records the reason for which it was stopped."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def stop(self, reason: str) -> None:
        self.reasons.append(reason)

    async def aclose(self, seconds: float | None = None) -> None:
        pass


class Drain:
    """A server without connections, at a time that the test sets, and the seconds given to its watchdog."""

    def __init__(self) -> None:
        self.now = 100.0
        self.engine = RecordingEngine()
        self.watchdog: list[float] = []
        self.admission = AdmissionController(ServerLimits(drain_timeout=60.0), clock=lambda: self.now)
        config = uvicorn_config(None, log_level="warning")
        self.server = DrainingServer(config, self.engine, self.admission, self.watchdog.append)

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def stops_at(self, now: float) -> bool:
        self.now = now
        return asyncio.run(self.server.on_tick(1))


def test_a_server_stops_as_soon_as_its_calls_have_ended() -> None:
    drain = Drain()
    permit = drain.admission.open_call(ANONYMOUS)
    assert not drain.stops_at(101.0)
    drain.signal()
    assert not drain.stops_at(159.0)
    assert drain.watchdog == [60.0 + STOP_SECONDS + WATCHDOG_SECONDS]
    permit.close()
    assert drain.stops_at(159.5)
    assert not drain.engine.reasons
    assert drain.watchdog[1:] == [STOP_SECONDS + WATCHDOG_SECONDS]


def test_a_server_stops_at_its_drain_timeout_at_the_latest() -> None:
    drain = Drain()
    drain.admission.open_call(ANONYMOUS)
    drain.signal()
    assert not drain.stops_at(159.9)
    assert drain.stops_at(160.0)
    assert "(drain_timeout=60 s): send it again" in drain.engine.reasons[0]


def test_a_second_signal_stops_the_server_at_once_and_a_third_one_delays_nothing() -> None:
    drain = Drain()
    drain.admission.open_call(ANONYMOUS)
    for _ in range(3):
        drain.signal()
    assert drain.watchdog[1:] == [FORCED_STOP_SECONDS + WATCHDOG_SECONDS]
    assert drain.server.config.timeout_graceful_shutdown == FORCED_STOP_SECONDS
    assert drain.stops_at(100.0)
    assert "(it received a second signal)" in drain.engine.reasons[0]


def test_a_drain_that_is_requested_again_delays_and_forces_nothing() -> None:
    """The cluster of a server can fail while a signal has stopped the server already."""
    drain = Drain()
    drain.admission.open_call(ANONYMOUS)
    drain.signal()
    drain.now = 130.0
    drain.server.drain()
    assert drain.watchdog == [60.0 + STOP_SECONDS + WATCHDOG_SECONDS]
    assert not drain.stops_at(159.9)
    assert drain.stops_at(160.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_process_answers_accepted_calls_after_a_signal(
    number: signal.Signals, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    model = str(tiny_model_dir("llama"))
    options = ["--skip-tokenizer-init", "--max-num-seqs", "1"]
    process = subprocess.Popen(
        [sys.executable, FAKE_SERVER, "serve", model, "--port", "0", *options], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    started: list[str] = []
    for line in process.stderr:
        started.append(line)
        if found := re.search(r"ready in \S+ s: (\S+)/v1", line):
            url = found[1]
            break
    assert "requests for hosts other than localhost, 127.0.0.1, [::1], *.localhost get a 400" in "".join(started)
    answers: list[httpx.Response] = []
    too_late: list[httpx.TransportError] = []

    def call() -> None:
        try:
            answers.append(
                httpx.post(
                    f"{url}/v1/completions", json=completion_body(30, prompt=[3]), timeout=AMPLE_SECONDS, verify=NO_TLS
                )
            )
        except httpx.TransportError as error:
            too_late.append(error)

    callers = [threading.Thread(target=call) for _ in range(12)]
    for caller in callers:
        caller.start()
    running = re.compile(r"^vllm:num_requests_running\S* [1-9]", re.MULTILINE)
    wait_for(lambda: bool(answers or running.search(httpx.get(f"{url}/metrics", verify=NO_TLS).text)))
    process.send_signal(number)
    log = process.stderr.read()
    for caller in callers:
        caller.join()
    assert process.wait(AMPLE_SECONDS) == 0
    accepted = re.search(r"shutting down after (\d+) calls", log)
    assert accepted is not None
    statuses = sorted(answer.status_code for answer in answers)
    assert len(statuses) + len(too_late) == 12
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= max(1, int(accepted[1]))
