"""Tests the live page of a model with two replicas in Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from chairlift import AsyncLLM
from chairlift.cluster.cluster_app import replicated_model
from chairlift.cluster.cluster_client import ClusterClient
from chairlift.config import EngineConfig
from chairlift.server.application import create_models_app
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.model_options import ModelSpec
from support.in_process_cluster import InProcessTransport
from support.running_server import open_options, run_app


@pytest.fixture(scope="module")
def url(tiny_model_dir: Callable[..., Path]) -> Iterator[str]:
    """Two replicas in this process, which have different numbers of seats."""
    folder = str(tiny_model_dir("llama"))
    engines = [
        AsyncLLM(
            model=folder, num_kv_blocks=60, skip_tokenizer_init=True, num_threads=1, max_num_seqs=seats, block_size=16,
            enable_kv_cache_events=True,
        )
        for seats in (2, 3)
    ]  # fmt: skip
    transport = InProcessTransport({f"replica-{index}": engine._client for index, engine in enumerate(engines)})
    client = ClusterClient(transport, engines[0].engine)
    model = replicated_model(ModelSpec("tiny", EngineConfig(folder)), client)
    with run_app(create_models_app(ModelManager([model]), open_options())) as (address, _server):
        yield address


def test_the_live_page_shows_the_chosen_replica(page: Page, url: str, check_page: Callable[[str], None]) -> None:
    page.goto(f"{url}/?replica=replica-0")
    expect(page.locator("#choose-replica")).to_have_value("replica-0")
    expect(page.locator("#choose-model")).to_be_hidden()
    expect(page.locator("#figure-running")).to_have_text("0 / 2")
    page.select_option("#choose-replica", "replica-1")
    page.wait_for_url("**/?replica=replica-1")
    expect(page.locator("#choose-replica")).to_have_value("replica-1")
    expect(page.locator("#figure-running")).to_have_text("0 / 3")
    check_page("replicas")
