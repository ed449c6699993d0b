"""The planned KV memory of a model with windows is the measured one, and the tokens do not depend on the release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.window_memory import compare, parse_arguments, print_comparison


def test_planned_memory_and_requests_equal_the_measured_ones(
    tiny_model_dir: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--context", "240", "--output-len", "20", "--memory", "512KiB", "--max-num-batched-tokens", "64"]
    args = parse_arguments(words)
    results = compare(tiny_model_dir("gemma3"), args)
    for result in results.values():
        assert (result.planned_bytes, result.planned_requests) == (result.held_bytes, result.run_requests)
        assert result.held_bytes <= result.peak_bytes <= result.most_bytes
    kept, released = results["kept"], results["released"]
    assert kept.token_ids == released.token_ids
    # 15 blocks of 239 slots in 4 layers, against 1 layer, and 3 with a window of 20 tokens, which are in 3 blocks.
    block_bytes = kept.held_bytes // (15 * 4)
    assert released.held_bytes == (15 + 3 * 3) * block_bytes
    assert released.run_requests > 2 * kept.run_requests
    print_comparison(results, args)
    assert "the tokens are the same" in capsys.readouterr().out
