"""The API over several replicas: requests and their explanations, traces and lines of the access log."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from chairlift import AsyncLLM, EngineConfig
from chairlift.clock import MonotonicClock
from chairlift.cluster.cluster_app import ClusterSetup, build_cluster_app, observe_replicas
from chairlift.cluster.cluster_client import ClusterClient
from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.engine.event_hub import EventHub
from chairlift.engine.process.client import EngineStatus
from chairlift.events import RequestArrived
from chairlift.server.api.routes import LARGE_BODY
from chairlift.server.application import create_app
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.models.served_model import MAX_ENDED_REPLICAS, ServedModel, VisibleEngine
from chairlift.server.serve_options import ObservabilityOptions
from chairlift.server.telemetry.tracing import LOST_STATUS, RESENT_STATUS
from support.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from support.in_process_cluster import InProcessTransport, make_cluster
from support.running_server import open_options, redirect_access_log, run_app
from support.step_gate import StepGate
from support.waiting import wait_for


@dataclass
class ClusterServer:
    """A server over replicas in this process."""

    llm: AsyncLLM
    transport: InProcessTransport
    url: str

    def get(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status_of(self, path: str) -> int:
        return httpx.get(f"{self.url}{path}").status_code

    def kill(self, name: str) -> None:
        """Kill a replica, and wait until the server has noticed it."""
        assert self.llm._loop is not None
        self.llm._loop.call_soon_threadsafe(self.transport.kill, name)
        wait_for(lambda: name not in self.get("/v1/engine")["replicas"])

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body)


class SilentReplica(VisibleEngine):
    def status(self) -> EngineStatus:
        raise AssertionError


Serve = Callable[..., Any]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "access.jsonl"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The receiver of the spans of a server."""
    exporter = InMemorySpanExporter()
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter"
    monkeypatch.setattr(name, lambda endpoint: exporter)
    return exporter


@pytest.fixture
def serve(tiny_model_dir: Callable[..., Path], log: Path, exporter: InMemorySpanExporter) -> Serve:
    folder = str(tiny_model_dir("llama"))
    observability = ObservabilityOptions("json", otlp_traces_endpoint="http://unused")

    @contextmanager
    def run(num_replicas: int = 2, **options: Any) -> Iterator[ClusterServer]:
        options = {"num_threads": 1, "skip_tokenizer_init": True, "enable_kv_cache_events": True, "seed": 0, **options}
        engines = [AsyncLLM(model=folder, num_kv_blocks=64, **options) for _ in range(num_replicas)]
        llm, transport = make_cluster(*engines)
        app = create_app(llm, open_options("tiny", observability=observability))
        redirect_access_log(app, log)
        observe_replicas(app.state.models.default, llm._client)  # type: ignore[arg-type]
        with run_app(app) as (url, _server):
            wait_for(lambda: transport.view._subscribed.keys() == transport.view._running)
            yield ClusterServer(llm, transport, url)

    return run


@pytest.mark.parametrize("kind", ["", "/explain"])
def test_the_sequences_of_a_call_are_found_on_all_replicas(serve: Serve, kind: str) -> None:
    with serve() as server:
        prompts = [[index, 5, 6, 7] for index in range(12)]
        server.complete([1, 2, 3], max_tokens=1, request_id="other")
        call_id = server.complete(prompts, max_tokens=4, n=2, seed=0, request_id="many").json()["id"]
        assert min(server.transport.num_runs.values()) > 1
        ids = [each["id"].rpartition("~")[0] for each in server.get(f"/v1/requests/{call_id}{kind}")["sequences"]]
        all_ids = [f"{call_id}.{index}" for index in range(12) for _ in range(2)]
        assert ids == (all_ids[:16] if kind else all_ids), "at most 16 sequences are explained"
        assert len(server.get(f"/v1/requests/{call_id}.7{kind}")["sequences"]) == 2


def test_requests_of_a_replica_that_has_ended_are_found(serve: Serve) -> None:
    with serve(num_replicas=1) as server:
        call_id = server.complete([1, 2, 3], max_tokens=2).json()["id"]
        before = server.get(f"/v1/requests/{call_id}")
        server.kill("replica-0")
        assert server.get(f"/v1/requests/{call_id}")["sequences"][0]["state"] == "finished"
        assert server.get(f"/v1/requests/{call_id}") == before
        assert server.get(f"/v1/requests/{call_id}/explain")["sequences"][0]["state"] == "finished"
        assert 'replica="replica-0"' not in httpx.get(f"{server.url}/metrics").text
        assert server.status_of("/v1/engine?replica=replica-0") == 404
        assert server.get("/v1/page")["replicas"] == server.get("/v1/requests")["data"] == []


NUM_TOKENS = 60
"""More than the steps in which the replicas read the requests."""


def send_and_kill(server: ClusterServer) -> list[int]:
    """Send eight calls, and kill a replica while both of them compute one; returns the statuses of the calls."""
    cores = [replica.client.engine.core for replica in server.transport.replicas.values()]  # type: ignore[attr-defined]
    client: Any = server.llm._client
    with ThreadPoolExecutor(8) as pool, StepGate(*cores) as gate:
        calls = [
            pool.submit(server.complete, [index, 5, 6], max_tokens=NUM_TOKENS, request_id=f"r{index}")
            for index in range(8)
        ]
        wait_for(lambda: sum(server.transport.num_runs.values()) == 8)
        while len(server.get("/v1/requests")["data"]) < 8:  # An engine reads new requests after each step.
            gate.allow(1)
        wait_for(lambda: sum(group.has_started for group in list(client._groups)) == 2)
        server.kill("replica-0")
    return [call.result().status_code for call in calls]


def test_a_lost_replica_is_shown_in_requests_traces_and_the_access_log(
    serve: Serve, log: Path, exporter: InMemorySpanExporter
) -> None:
    with serve(max_num_seqs=1) as server:
        statuses = send_and_kill(server)
        assert sorted(statuses) == [200] * 7 + [503]
        check_requests(server, statuses)
    check_telemetry(log, exporter, statuses)


def check_requests(server: ClusterServer, statuses: list[int]) -> None:
    """Check that lost requests are found, and those that were sent again once."""
    for index, status in enumerate(statuses):
        (found,) = server.get(f"/v1/requests/cmpl-r{index}")["sequences"]
        (explained,) = server.get(f"/v1/requests/cmpl-r{index}/explain")["sequences"]
        assert found["state"] == explained["state"] == ("finished" if status == 200 else "lost")
        num_tokens = found["num_output_tokens"]
        assert num_tokens == NUM_TOKENS if status == 200 else 0 < num_tokens < NUM_TOKENS
        assert found["num_blocks"] == 0
        assert found["replica"] == explained["replica"] == ("replica-1" if status == 200 else "replica-0")


def check_telemetry(log: Path, exporter: InMemorySpanExporter, statuses: list[int]) -> None:
    """Check that traces and access log show the replicas of each call."""
    lines = {line["request_id"]: line for line in map(json.loads, log.read_text().splitlines()) if "ttft" in line}
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        assert span.resource.attributes["process.pid"] == os.getpid()
        if span.name == "sequence":
            assert span.attributes is not None
            spans.setdefault(str(span.attributes["gen_ai.request.id"]).rpartition("~")[0], []).append(span)
    kinds = []
    for index, status in enumerate(statuses):
        name = f"cmpl-r{index}"
        *lost, last = spans[name]
        replicas = [span.attributes and span.attributes.get("chairlift.replica") for span in spans[name]]
        assert lines[name]["replica"] == ",".join(map(str, replicas))
        assert lines[name]["prompt_tokens"] == 3, "the tokens of a lost sequence do not count twice"
        assert [(span.status.is_ok, span.status.description) for span in lost] == [(False, RESENT_STATUS)] * len(lost)
        assert last.status.description == (None if status == 200 else LOST_STATUS)
        assert all((span.start_time or 0) < (span.end_time or 0) < (last.end_time or 0) for span in lost)
        kinds.append((status, replicas))
    assert sorted(kinds)[-1] == (503, ["replica-0"])
    assert {tuple(replicas) for status, replicas in kinds if status == 200} >= {
        ("replica-1",),
        ("replica-0", "replica-1"),
    }


def test_only_the_last_replicas_that_have_ended_are_kept() -> None:
    model = ServedModel(ModelSpec("tiny"), EventHub())
    count = 2 * MAX_ENDED_REPLICAS + 6
    for index in range(count):
        name = f"replica-{index}"
        replica = SilentReplica("tiny", EventHub(), MonotonicClock(), name)
        model.replicas[name] = replica
        if index % 2:
            replica.events.publish([RequestArrived(0.0, f"r{index}", 3, 4)])
        model.end_replica(name)
    assert not model.replicas
    known = [request.request_id for observer in model.ended_observers for request in observer.tracker.requests()]
    assert known == [f"r{index}" for index in range(7, count, 2)]
    assert {request.state for observer in model.ended_observers for request in observer.tracker.requests()} == {"lost"}


def test_large_bodies_select_their_model(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    write_byte_tokenizer(folder)
    config = EngineConfig(model=str(folder), num_kv_blocks=64, num_threads=1, enable_kv_cache_events=True)
    specs = tuple(ModelSpec(name, config) for name in ("first", "second"))
    setup = ClusterSetup(specs, ClusterOptions(), open_options())
    clients = {}
    for spec in specs:
        engine = AsyncLLM(config)
        clients[spec.name] = ClusterClient(InProcessTransport({"replica-0": engine._client}), engine.engine)
    app = build_cluster_app(setup, clients)
    with run_app(app) as (url, _server):
        for spec in specs:
            body = json.dumps({"model": spec.name, "prompt": "one two", "max_tokens": 2}) + " " * LARGE_BODY
            headers = {"Content-Type": "application/json"}
            answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=120)
            assert (answer.status_code, answer.json()["model"]) == (200, spec.name)
