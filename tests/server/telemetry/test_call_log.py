"""Tests the access log and the OpenTelemetry spans of calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.clock import VirtualClock
from chairlift.engine.event_hub import EventHub
from chairlift.errors import ConfigError
from chairlift.server.access.call import Call
from chairlift.server.access.keys import Key
from chairlift.server.models.served_model import ServedModel
from chairlift.server.serve_options import ObservabilityOptions
from chairlift.server.telemetry.access_log import AccessLog
from chairlift.server.telemetry.call_log import CallListener, CallLogMiddleware
from chairlift.server.telemetry.engine_observer import EngineObserver, ObservedRequest
from chairlift.server.telemetry.tracing import CallTracer
from support.running_server import RunningServer
from support.tracked_engine import TrackedEngine
from support.waiting import wait_for

SECRET = "my dear diary"


def answering(
    status: int = 200, call_id: str | None = "r3", is_disconnected: bool = False, finish_reason: str | None = None
) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = scope["state"]["call"]
        call.key, call.id, call.model, call.finish_reason = Key("ann"), call_id, "tiny", finish_reason
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": is_disconnected})
        if is_disconnected:
            raise OSError("the client is gone")

    return app


@pytest.fixture
def observer() -> EngineObserver:
    """The observer of an engine in which r3 waited for a seat."""
    engine = TrackedEngine(max_num_seqs=2)
    for start in range(3):
        engine.add([start, 5, 6], 4, late=0.01, tenant="ann")
    engine.to_end()
    hub = EventHub()
    found = EngineObserver(hub, VirtualClock())
    assert engine.tracker.started is not None
    hub.publish([engine.tracker.started, *engine.log.events])
    return found


def log_to(path: Path, log_format: str) -> AccessLog:
    """An access log that writes to a file instead of standard error."""
    log = AccessLog(log_format)
    log._file = path.open("w")  # type: ignore[assignment]
    return log


def call(observer: EngineObserver, app: ASGIApp, *listeners: CallListener, **options: Any) -> None:
    logged = CallLogMiddleware(app, observer.find, listeners)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(logged), base_url="http://server") as client:
            await client.post(options.pop("path", "/v1/completions"), json={"prompt": SECRET}, **options)

    asyncio.run(ask())


def test_a_json_line_has_sizes_and_times_but_no_prompt(observer: EngineObserver, tmp_path: Path) -> None:
    call(observer, answering(), log_to(tmp_path / "log", "json"))
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert SECRET not in line
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields.pop("end").endswith("+00:00")
    assert fields.pop("duration") >= 0
    request = observer.tracker.get("r3")
    assert request is not None
    assert request.first_token is not None
    assert fields == {
        "level": "INFO",
        "client": "127.0.0.1",
        "key": "ann",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": "r3",
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "output_tokens": 4,
        "queue_time": pytest.approx(request.queue_time, abs=1e-6),
        "ttft": pytest.approx(request.first_token - request.arrived.time, abs=1e-6),
        "finish_reason": "length",
    }


def test_a_text_line_begins_with_seven_values_and_has_no_prompt(observer: EngineObserver, tmp_path: Path) -> None:
    call(observer, answering(404, None), log_to(tmp_path / "log", "text"))
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert " INFO 127.0.0.1 ann POST /v1/completions 404 duration=" in line
    assert SECRET not in line


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (f"prompt must be a string or a list, got {{'text': '{SECRET}'}}", "prompt must be a string or a list"),
        ("x" * 300, "x" * 200),
    ],
)
def test_a_line_has_the_reason_of_an_error_without_the_value_of_the_client(
    observer: EngineObserver, tmp_path: Path, message: str, reason: str
) -> None:
    call(observer, JSONResponse({"error": {"message": message}}, 400), log_to(tmp_path / "log", "json"))
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert SECRET not in line
    assert json.loads(line)["reason"] == reason


@pytest.mark.parametrize(("path", "status", "is_logged"), [("/page/live.js", 200, False), ("/page/x.js", 404, True)])
def test_files_of_pages_are_logged_only_if_they_fail(
    observer: EngineObserver, tmp_path: Path, path: str, status: int, is_logged: bool
) -> None:
    call(observer, answering(status, None), log_to(tmp_path / "log", "text"), path=path)
    assert bool((tmp_path / "log").read_text()) is is_logged


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_path_cannot_forge_a_line_or_a_field(observer: EngineObserver, tmp_path: Path, log_format: str) -> None:
    path = "/x 200\nforged\x1b[2J\u2028\x85 /v1"
    log_to(tmp_path / "log", log_format)(Call("GET", path, "127.0.0.1", id="a\x9b\n"), [])
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.isprintable()
    if log_format == "text":
        assert "GET /x%20200%0Aforged%1B%5B2J%E2%80%A8%C2%85%20/v1 499 " in line


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_logged_as_finish_reason_stop(api_server: RunningServer, stream: bool) -> None:
    body = {"prompt": "once", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = api_server.post("/v1/completions", body)
    text = whole.json()["choices"][0]["text"]
    stopped = api_server.post("/v1/completions", {**body, "stop": [text[2]], "stream": stream})
    assert '"finish_reason":"stop"' in stopped.text

    def reasons() -> list[str]:
        named = [(line.get("request_id") or "no id", line) for line in api_server.logged_calls()]
        return [line["finish_reason"] for answer in (whole, stopped) for name, line in named if name in answer.text]

    wait_for(lambda: len(reasons()) == 2)
    assert reasons() == ["length", "stop"]


def test_the_finish_reason_is_logged_before_the_engine_event(tmp_path: Path) -> None:
    engine = TrackedEngine()
    engine.add([1, 2, 3], 9, tenant="ann")
    engine.steps(3)
    hub = EventHub()
    observer = EngineObserver(hub, VirtualClock())
    hub.publish(engine.log.events)

    exporter = InMemorySpanExporter()
    tracer = CallTracer(exporter)
    call(observer, answering(call_id="r1", finish_reason="stop"), log_to(tmp_path / "log", "json"), tracer)
    tracer.close()
    assert json.loads((tmp_path / "log").read_text())["finish_reason"] == "stop"
    (sequence,) = (span for span in exporter.get_finished_spans() if span.name == "sequence")
    assert sequence.attributes is not None
    assert sequence.attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_an_earlier_call_with_the_same_id_is_not_mixed_in(observer: EngineObserver) -> None:
    found: list[list[ObservedRequest]] = []
    clock = VirtualClock(1e6)
    later = EngineObserver(EventHub(), clock)
    later.tracker, later._calls = observer.tracker, observer._calls
    call(later, answering(), lambda _, sequences: found.append(sequences))
    assert found == [[]]


def test_a_pause_between_two_readings_of_the_clock_does_not_hide_a_sequence(
    observer: EngineObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second passes between two readings, and the request arrives right after the call, which begins at 0."""
    seconds = itertools.count(0.0, 1.0)
    paused = EngineObserver(EventHub(), SimpleNamespace(now=lambda: next(seconds)))  # type: ignore[arg-type]
    paused.tracker, paused._calls = observer.tracker, observer._calls
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    found: list[list[ObservedRequest]] = []
    call(paused, answering(), lambda _, sequences: found.append(sequences))
    assert [each.request.request_id for (each,) in found] == ["r3"]


def test_a_disconnected_client_is_logged(observer: EngineObserver) -> None:
    calls: list[Call] = []
    with pytest.raises(OSError, match="the client is gone"):
        call(observer, answering(is_disconnected=True), lambda call, _: calls.append(call))
    assert [call.is_disconnected for call in calls] == [True]


def test_probes_are_not_logged_while_they_succeed(observer: EngineObserver) -> None:
    calls: list[Call] = []
    for status in (200, 503):
        call(observer, answering(status, None), lambda call, _: calls.append(call), path="/ready")
    assert [call.status for call in calls] == [503]


def test_spans_continue_the_callers_trace(observer: EngineObserver) -> None:
    exporter = InMemorySpanExporter()
    tracer = CallTracer(exporter)
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    call(observer, answering(), tracer, headers={"traceparent": f"00-{trace}-{parent}-01"})
    tracer.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {
        "text_completion tiny", "sequence", "wait: next_step", "wait: seats", "prefill", "decode"
    }  # fmt: skip
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {trace}
    root, sequence = spans["text_completion tiny"], spans["sequence"]
    assert {name: value for name, value in (root.attributes or {}).items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "chairlift",
        "gen_ai.request.id": "r3",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": sequence.attributes["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == parent
    for name in ("wait: seats", "prefill", "decode"):
        assert spans[name].parent == sequence.context
    assert seconds(spans["wait: next_step"]) + seconds(spans["wait: seats"]) == pytest.approx(
        sequence.attributes["gen_ai.latency.time_in_queue"], abs=1e-5
    )
    assert sequence.attributes["gen_ai.usage.output_tokens"] == 4
    assert SECRET not in str([dict(span.attributes or {}) for span in spans.values()])


@pytest.mark.parametrize(("seconds_later", "is_logged"), [(5.0, True), (-5.0, False)])
def test_times_of_a_replica_on_another_machine_are_converted(
    observer: EngineObserver, monkeypatch: pytest.MonkeyPatch, seconds_later: float, is_logged: bool
) -> None:
    """The requests of the replica arrived almost at 0 of its clock, `seconds_later` than the call. No clock moves."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    monkeypatch.setattr(time, "perf_counter", lambda: 1e6)
    there = EngineObserver(EventHub(), VirtualClock(-seconds_later))
    there.tracker, there._calls = observer.tracker, observer._calls
    model: Any = SimpleNamespace(engines=[SimpleNamespace(observer=there)], ended_observers=[])
    found: Any = SimpleNamespace(find=partial(ServedModel.find_sequences, model))
    exporter = InMemorySpanExporter()
    tracer = CallTracer(exporter)
    call(found, answering(), tracer)
    tracer.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert ("sequence" in spans) == is_logged
    if is_logged:
        shift = (spans["sequence"].start_time - spans["text_completion tiny"].start_time) / 1e9
        assert shift == pytest.approx(5.0, abs=0.5)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_calls_that_do_not_reach_the_engine_are_not_traced(observer: EngineObserver) -> None:
    exporter = InMemorySpanExporter()
    tracer = CallTracer(exporter)
    call(observer, answering(401, None), tracer)
    tracer.close()
    assert not exporter.get_finished_spans()


def test_an_unknown_format_is_rejected() -> None:
    with pytest.raises(ConfigError, match="access_log_format must be one of text, json, none"):
        ObservabilityOptions("xml")


FULL = Path("/dev/full")


def test_a_line_is_written_at_once_to_standard_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    with path.open("w") as file:
        monkeypatch.setattr(sys, "__stderr__", file)
        AccessLog("text").write("one \U0001f600")
        assert path.read_text() == "one \U0001f600\n"


def test_standard_error_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "__stderr__", None)
    AccessLog("text").write("nowhere")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_standard_error_may_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    full = FULL.open("w")
    monkeypatch.setattr(sys, "__stderr__", full)
    log = AccessLog("text")
    for _ in range(3):
        log.write("lost")
    with contextlib.suppress(OSError):
        full.close()
