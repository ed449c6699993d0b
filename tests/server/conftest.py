"""Servers for the tests: one with the default model, and servers with tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="session")
def tiny_llm(tiny_model_dir: Callable[..., Path]) -> Callable[..., AsyncLLM]:
    """`tiny_llm(**options)` -> an engine over a tiny model without a tokenizer."""

    def make(**options: Any) -> AsyncLLM:
        common: dict[str, Any] = {"num_kv_blocks": 60, "num_threads": 1, "skip_tokenizer_init": True}
        return AsyncLLM(model=str(tiny_model_dir("llama")), **common | options)

    return make


@pytest.fixture
def tiny_server(tiny_llm: Callable[..., AsyncLLM]) -> Iterator[RunningServer]:
    with run_server(tiny_llm(max_num_seqs=1), "tiny") as running:
        yield running


@pytest.fixture(scope="session")
def api_folder(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose tokenizer and template support tools, reasoning and documents."""
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    return with_api_tokenizer(tiny, tmp_path_factory.mktemp("api"))


@pytest.fixture(scope="session")
def api_server(api_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    llm = AsyncLLM(model=str(api_folder), num_kv_blocks=200, num_threads=1, max_num_seqs=8)
    with run_server(llm, "tiny", access_log=tmp_path_factory.mktemp("log") / "access.jsonl") as running:
        yield running
