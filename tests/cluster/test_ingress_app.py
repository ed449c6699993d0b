"""The application of an ingress over replicas in this process: large bodies for each of its models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx

from chairlift import AsyncLLM, EngineConfig
from chairlift.cluster.cluster_app import ClusterSetup, build_cluster_app
from chairlift.cluster.cluster_client import ClusterClient
from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.server.api.routes import LARGE_BODY
from chairlift.server.models.model_options import ModelSpec
from support.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from support.in_process_cluster import InProcessTransport
from support.running_server import open_options, run_app


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
