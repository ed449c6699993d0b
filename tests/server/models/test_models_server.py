"""Tests a server with several models over HTTP.

Engines run in threads of this process, which starts them sooner. One test switches models whose engines have processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift import LLM, AsyncLLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.event_hub import EventHub
from chairlift.server.access.keys import Key, KeyRing, digest
from chairlift.server.api.routes import LARGE_BODY
from chairlift.server.application import create_models_app
from chairlift.server.models import engine_loader, model_manager
from chairlift.server.models.engine_loader import EngineLoader
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.model_options import ModelOptions, ModelSpec
from chairlift.server.models.served_model import ModelService, ServedModel
from chairlift.server.serve import reload_files
from chairlift.server.serve_options import ServeOptions
from chairlift.system.memory_amounts import parse_memory
from support.byte_tokenizer import write_byte_tokenizer
from support.pooling_models import TEXTS, write_pooling_model
from support.running_server import open_options, run_app
from support.step_gate import StepGate
from support.waiting import AMPLE_SECONDS, until, wait_for

ADMIN, LIMITED = "admin-secret-0123456789", "limited-secret-0123456789"
PROMPT = "The quick brown fox"


@dataclass(frozen=True, slots=True)
class ModelsServer:
    url: str
    manager: ModelManager
    folders: dict[str, Path]

    def post(self, path: str, body: Any, key: str = ADMIN) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, json=body, headers=headers)

    def get(self, path: str, key: str = ADMIN) -> Any:
        return httpx.get(self.url + path, headers={"Authorization": f"Bearer {key}"}).json()

    def complete(self, model: str, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 8, **fields})

    def states(self) -> dict[str, str]:
        return {model["id"]: model["status"]["value"] for model in self.get("/v1/models")["data"]}


class ThreadLoader(EngineLoader):
    """Runs each engine in a thread of this process."""

    async def load(self, model: ServedModel, config: EngineConfig) -> ModelService:
        llm = await asyncio.to_thread(AsyncLLM, config)
        model.events.open(asyncio.get_running_loop())
        llm.events.add(model.events)
        return ModelService(llm, model.spec.api)


@contextlib.contextmanager
def run_models(
    specs: list[ModelSpec],
    folders: dict[str, Path],
    memory: str | None = None,
    make_loader: Callable[[float], EngineLoader] = ThreadLoader,
) -> Iterator[ModelsServer]:
    keys = KeyRing(
        [Key("admin", digest(ADMIN), is_admin=True), Key("limited", digest(LIMITED), models=frozenset({"b"}))]
    )
    loader = make_loader(120.0)
    budget = None if memory is None else parse_memory(memory)
    manager = ModelManager([ServedModel(spec, EventHub()) for spec in specs], loader, budget)
    app = create_models_app(manager, open_options(keys=keys))
    with run_app(app) as (url, _server):
        yield ModelsServer(url, manager, folders)
    manager.close()


@pytest.fixture(scope="module")
def folders(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one architecture with other sizes, and one that is a copy."""
    made = {}
    for name, arch, hidden in (("a", "llama", 64), ("b", "qwen3", 64), ("c", "llama", 128)):
        tiny = tiny_model_dir(arch, vocab_size=400, hidden_size=hidden)
        made[name] = shutil.copytree(tiny, tmp_path_factory.mktemp("models") / name)
        write_byte_tokenizer(made[name])
    return made


def specs_of(folders: dict[str, Path], **options: Any) -> list[ModelSpec]:
    return [
        ModelSpec(name, EngineConfig(str(path), num_kv_blocks=40, num_threads=1, **options), (f"{name}-alias",))
        for name, path in folders.items()
    ]


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[ModelsServer]:
    two = {name: folders[name] for name in ("a", "b")}
    with run_models(specs_of(two), two) as running:
        yield running


def test_each_call_is_answered_by_the_model_that_it_names(server: ModelsServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=ADMIN, max_retries=0)
    with ThreadPoolExecutor(8) as pool:
        names = ["a", "b", "a-alias", "b"]

        def complete(name: str) -> tuple[str, str]:
            done = client.completions.create(model=name, prompt=PROMPT, max_tokens=8, temperature=0)
            return done.model, done.choices[0].text

        answers = list(pool.map(complete, names))
    assert [model for model, _ in answers] == ["a", "b", "a", "b"]
    for name, (_, text) in zip(["a", "b"], answers[:2], strict=True):
        llm = LLM(model=str(server.folders[name]), num_kv_blocks=40, num_threads=1)
        assert llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text == text
    assert server.states() == {"a": "loaded", "b": "loaded"}


def test_the_event_log_of_each_loaded_model_is_reopened(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = {name: tmp_path / f"{name}.jsonl" for name in "ab"}
    specs = specs_of({name: folders[name] for name in "ab"})
    specs = [replace(spec, config=replace(spec.config, event_log=logs[spec.name])) for spec in specs]
    options = ServeOptions(models=ModelOptions(keep_alive=60.0))
    with run_models(specs, folders) as server, caplog.at_level(logging.INFO, "chairlift"):
        assert server.complete("a").status_code == 200
        rotated = logs["a"].rename(tmp_path / "a.1")
        asyncio.run(reload_files(options, server.manager))
        assert server.complete("a").status_code == 200
    assert "SIGHUP: files reopened: event_log (by the engine of 'a'); no API keys were read" in caplog.messages
    assert [path.read_text().count("request_finished") for path in (rotated, logs["a"])] == [1, 1]
    assert not logs["b"].exists(), "the model was not loaded"


def test_a_large_body_is_prepared_with_the_tokenizer_of_its_model(server: ModelsServer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 3
    body = {"prompt": [text] * 400, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    assert len(json.dumps(body)) > LARGE_BODY
    for name in ("a", "b"):
        answer = server.post("/v1/completions", {**body, "model": name})
        assert answer.status_code == 200, answer.text
        small = server.post("/v1/completions", {**body, "model": name, "prompt": text}).json()["choices"][0]
        assert [choice["text"] for choice in answer.json()["choices"]] == [small["text"]] * 400
    unknown = server.post("/v1/completions", {**body, "model": "c"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_a_key_sees_and_uses_only_its_models(server: ModelsServer) -> None:
    assert [model["id"] for model in server.get("/v1/models", LIMITED)["data"]] == ["b"]
    refused = server.post("/v1/completions", {"model": "a", "prompt": "x"}, LIMITED)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    assert server.post("/models/unload", {"model": "b"}, LIMITED).status_code == 403
    default = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, LIMITED).json()
    assert default["model"] == "b"
    assert server.get("/server_info", LIMITED)["served_model_name"] == "b"
    for path in ("/server_info", "/model_info", "/tokenizer_info"):
        assert server.get(f"{path}?model=a", LIMITED)["error"]["code"] == "model_not_allowed"


def test_metrics_and_engines_of_all_models(server: ModelsServer) -> None:
    for name in ("a", "b"):
        assert server.complete(name).status_code == 200
        engine = server.get(f"/v1/engine?model={name}")
        assert (engine["model"], engine["status"]["state"]) == (name, "running")
    text = httpx.get(f"{server.url}/metrics").text
    assert text.count("# TYPE vllm:num_requests_running ") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    tokens = {s.labels["model_name"]: s.value for s in families["vllm:generation_tokens"].samples}
    assert tokens["a"] >= 8 <= tokens["b"]


@pytest.fixture
def may_load(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds the loads of models until it is set."""
    load, may_load = ThreadLoader.load, threading.Event()

    async def held_load(*arguments: Any) -> Any:
        await until(may_load.is_set)
        return await load(*arguments)

    monkeypatch.setattr(ThreadLoader, "load", held_load)
    return may_load


def test_explain_says_that_a_call_waits_for_its_model(server: ModelsServer, may_load: threading.Event) -> None:
    assert server.post("/models/unload", {"model": "a"}).json()["status"]["value"] == "unloaded"
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(server.complete("a", request_id="waits")))
    thread.start()
    wait_for(lambda: bool(server.get("/v1/requests")["waiting_for_model"]))
    explained = server.get("/v1/requests/cmpl-waits/explain")
    assert explained["sequences"] == []
    assert explained["model_wait"]["is_waiting"]
    assert "model 'a'" in explained["model_wait"]["text"]
    hidden = httpx.get(
        f"{server.url}/v1/requests/cmpl-waits/explain",
        headers={"Authorization": f"Bearer {LIMITED}"},
        timeout=AMPLE_SECONDS,
    )
    assert hidden.status_code == 404
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as other:
        fields = f"Host: {host}\r\nAuthorization: Bearer {ADMIN}"
        other.sendall(f"GET /tokenizer_info?model=a HTTP/1.1\r\n{fields}\r\n\r\n".encode())
        wait_for(lambda: len(server.get("/v1/requests")["waiting_for_model"]) == 2)
    wait_for(lambda: len(server.get("/v1/requests")["waiting_for_model"]) == 1)
    may_load.set()
    thread.join()
    assert answers[0].json()["id"] == "cmpl-waits"
    explained = server.get("/v1/requests/cmpl-waits/explain")
    assert explained["model_wait"]["text"].endswith("until model 'a' was loaded.")
    assert len(explained["sequences"]) == 1


def test_a_timeout_passes_while_the_model_is_loaded(server: ModelsServer, may_load: threading.Event) -> None:
    server.post("/models/unload", {"model": "a"})
    late = server.complete("a", timeout=0.05)
    assert late.status_code == 408
    assert "while model 'a' was not loaded" in late.json()["error"]["message"]
    explained = server.get(f"/v1/requests/{late.headers['x-request-id']}/explain")
    assert "while model 'a' was not loaded" in explained["model_wait"]["text"]
    may_load.set()
    assert server.complete("a").status_code == 200


def test_answers_are_those_of_the_model_alone_while_models_are_switched(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for two of three models: every call is answered as by a server with this model alone."""
    monkeypatch.setattr(engine_loader, "trim_memory", lambda: None)  # A second for all objects of the tests.
    alone = {}
    for name, path in folders.items():
        llm = LLM(model=str(path), num_kv_blocks=40, num_threads=1)
        alone[name] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    with run_models(specs_of(folders), folders, "700MiB", EngineLoader) as server:
        with ThreadPoolExecutor(6) as pool:
            names = [name for name in "abca" for _ in range(3)]
            answers = list(pool.map(lambda name: (name, server.complete(name, temperature=0)), names))
        for name, answer in answers:
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == alone[name]
        assert "unloaded" in server.states().values()
        assert server.manager.memory_bytes <= parse_memory("700MiB")


def test_a_removed_model_file_fails_only_its_own_calls(folders: dict[str, Path], tmp_path: Path) -> None:
    copies = {name: shutil.copytree(folders[name], tmp_path / name) for name in ("a", "b")}
    with run_models(specs_of(copies), copies) as server:
        (copies["a"] / "model.safetensors").rename(tmp_path / "hidden")
        failed = server.complete("a")
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_load_failed")
        assert "model 'a' cannot be loaded" in failed.json()["error"]["message"]
        assert "model.safetensors" in failed.json()["error"]["message"]
        assert server.complete("b").status_code == 200
        assert server.states() == {"a": "failed", "b": "loaded"}
        assert httpx.get(f"{server.url}/ready").status_code == 200
        (tmp_path / "hidden").rename(copies["a"] / "model.safetensors")
        server.manager.models[0].failed_at -= model_manager.RETRY_SECONDS
        assert server.complete("a").status_code == 200


def test_an_encoder_beside_a_model_that_generates(folders: dict[str, Path], tmp_path: Path) -> None:
    encoder = write_pooling_model(tmp_path, "bert", "cls")
    specs = [
        *specs_of({"a": folders["a"]}),
        ModelSpec("encoder", EngineConfig(str(encoder), num_threads=1), ("text-embedding-3-small",)),
    ]
    expected = LLM(model=str(encoder), num_threads=1).embed(TEXTS[0], use_tqdm=False)[0]
    with run_models(specs, {}, "900MiB") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=ADMIN, max_retries=0)
        (vector,) = client.embeddings.create(model="text-embedding-3-small", input=TEXTS[0]).data
        assert vector.embedding == pytest.approx(expected, abs=1e-6)
        assert server.complete("a").status_code == 200
        assert server.states() == {"a": "loaded", "encoder": "loaded"}
        refused = server.complete("encoder")
        assert "computes vectors of texts: use /v1/embeddings" in refused.json()["error"]["message"]
        memory = {card["id"]: card["status"]["memory_bytes"] for card in server.get("/v1/models")["data"]}
        assert 0 < memory["encoder"] < 900 << 20


def test_a_stream_keeps_its_model_loaded(server: ModelsServer) -> None:
    assert server.complete("b").status_code == 200
    service: Any = server.manager.models[1].service
    gate = StepGate(service.llm.engine.core)  # The stream does not end before the call that it must outlive.

    async def read() -> tuple[int, int]:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        body = {"model": "b", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(headers=headers) as client,
            client.stream("POST", f"{server.url}/v1/completions", json=body) as stream,
        ):
            refused = await client.post(f"{server.url}/models/unload", json={"model": "b"})
            gate.open()
            count = 0
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    count += sum(bool(choice["text"]) for choice in json.loads(line[6:])["choices"])
            return refused.status_code, count

    with gate:
        status, count = asyncio.run(read())
    assert status == 409
    assert count > 0
