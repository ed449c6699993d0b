"""Speculative decoding changes no answer, whatever the parameters of the requests are."""

from __future__ import annotations

from pathlib import Path

from benchmarks.speculation_parity import MIXED, check

from chairlift.config import EngineConfig
from chairlift.engine.startup.loaded_model import load_model
from native import needs_native

pytestmark = needs_native


def test_answers_are_those_without_speculative_decoding(smollm2_gguf: Path) -> None:
    config = EngineConfig(model=str(smollm2_gguf), num_kv_blocks=600, max_model_len=1024, max_num_seqs=8, num_threads=1)
    counts = check(load_model(config), config, len(MIXED), 24, alone_share=0.5)
    assert 0 < counts["accepted"] < counts["draft tokens"]
