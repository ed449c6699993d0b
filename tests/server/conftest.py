"""Servers for the tests: one with the default model, and servers with tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_model import with_api_tokenizer

from chairlift import AsyncLLM
from support.byte_tokenizer import VOCAB_SIZE
from support.running_server import MODEL, RunningServer, run_server


@pytest.fixture(scope="session")
def server(smollm2_gguf: Path) -> Iterator[RunningServer]:
    llm = AsyncLLM(model=str(smollm2_gguf), num_kv_blocks=200, num_threads=1, max_num_seqs=4)
    with run_server(llm, MODEL) as running:
        yield running


@pytest.fixture
def tiny_server(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    llm = AsyncLLM(
        model=str(tiny_model_dir("llama")), num_kv_blocks=60, skip_tokenizer_init=True, num_threads=1, max_num_seqs=1
    )
    with run_server(llm, "tiny") as running:
        yield running


@pytest.fixture(scope="session")
def api_server(
    tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server with a tiny random model that supports tools, reasoning and documents."""
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    folder = with_api_tokenizer(tiny, tmp_path_factory.mktemp("api"))
    llm = AsyncLLM(model=str(folder), num_kv_blocks=200, num_threads=1, max_num_seqs=8)
    with run_server(llm, "tiny", access_log=tmp_path_factory.mktemp("log") / "access.jsonl") as running:
        yield running
