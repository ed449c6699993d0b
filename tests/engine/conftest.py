"""A fixture with one loaded default model for all engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift import LLM


@pytest.fixture(scope="session")
def llm(smollm2_gguf: Path) -> LLM:
    return LLM(str(smollm2_gguf), num_kv_blocks=400, num_threads=1, max_num_seqs=16)
