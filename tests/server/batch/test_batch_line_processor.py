"""A batch can be resumed after the engine has died, and its queue has no limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_files import by_id, completion_line, request_line, results, write_lines

from chairlift import EngineConfig
from chairlift.core.engine_core import EngineCore
from chairlift.errors import EngineDeadError
from chairlift.server.access.access_options import ServerLimits
from chairlift.server.batch.batch_runner import run_batch
from support.tiny_engine import tiny_options


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(**tiny_options(tmp_path / "model", num_kv_blocks=60, max_num_seqs=2))


def test_a_batch_is_resumed_after_the_engine_has_died(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, num_steps = EngineCore.step, 0

    def breaks(core: EngineCore) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 30:
            raise RuntimeError("out of order")
        return step(core)

    source = write_lines(tmp_path / "in.jsonl", [completion_line(i, 8) for i in range(20)])
    target = tmp_path / "out.jsonl"
    with monkeypatch.context() as broken:
        broken.setattr(EngineCore, "step", breaks)
        with pytest.raises(EngineDeadError, match="out of order"):
            run_batch(config, source, target)
    kept = by_id(target)
    assert 0 < len(kept) < 20
    assert all(answer["response"]["status_code"] == 200 for answer in kept.values()), (
        "the failure is not written as a result"
    )
    summary = run_batch(config, source, target)
    assert (summary.previously_done, summary.completed, summary.remaining) == (len(kept), 20 - len(kept), 0)
    assert by_id(target).items() >= kept.items()


def test_calls_may_have_more_prompts_than_the_queue_of_a_server(config: EngineConfig, tmp_path: Path) -> None:
    prompts = [[5]] * (ServerLimits().max_queued_requests // 2 + 1)
    lines = [request_line(name, prompt=prompts, max_tokens=1) for name in "ab"]
    source = write_lines(tmp_path / "in.jsonl", lines)
    run_batch(replace(config, max_num_seqs=64), source, tmp_path / "out.jsonl")
    for answer in results(tmp_path / "out.jsonl"):
        assert len(answer["response"]["body"]["choices"]) == len(prompts), answer
