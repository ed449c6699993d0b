"""A served session is recorded and read back as a workload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.lab.workload.traces import read_trace


def test_a_served_session_is_read_back_with_its_lengths_and_common_beginnings(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    llm = LLM(str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=50, record_trace=path)
    prompts = [list(range(3, 40)), [*range(3, 36), 99, 98], [7, 8, 9]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 4, 5)]
    llm.generate(prompts, params)
    llm.close()
    trace = sorted(read_trace(path), key=lambda request: request.output_len)
    assert [(len(r.prompt_token_ids), r.output_len) for r in trace] == [(37, 3), (35, 4), (3, 5)]
    first, second, _ = (list(request.prompt_token_ids) for request in trace)
    assert first[:32] == second[:32]
    assert "token_ids" not in path.read_text()


def test_a_trace_that_cannot_be_written_is_rejected(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_trace=.*No such file or directory; create the folder"):
        LLM(
            str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=50, record_trace=tmp_path / "no" / "t"
        )


def test_trace_and_event_log_must_be_different_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be different files"):
        EngineConfig(record_trace=tmp_path / "log", event_log=tmp_path / "log")
