"""The measuring part of fuzz-cost on a tiny model: figures of each kind of case, their order, and what is left out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.server_process import Usage
from benchmarks.victim import VictimReport
from tools import fuzz_cost
from tools.cost_cases import Case

from server.api_model import with_api_tokenizer
from support.byte_tokenizer import VOCAB_SIZE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def made_up(gap: float, *, status: int = 200, seconds: tuple[float, ...] = (0.1,), restarts: int = 0) -> object:
    usage = Usage({"http": 0.0, "engine": 0.0}, {"http": 0, "engine": 0}, restarts)
    report = VictimReport([0.01, gap], [0.002])
    return fuzz_cost.Measurement(Case("chat", "tools[]", str), 100, list(seconds), status, report, usage)


def test_each_limit_fails() -> None:
    assert not made_up(0.09).fails
    assert made_up(0.11).fails
    assert made_up(0.01, status=500).fails
    assert made_up(0.01, status=fuzz_cost.NO_ANSWER).fails
    assert made_up(0.01, restarts=1).fails
    assert made_up(0.01, seconds=(0.1, 0.3, 0.9)).fails
    assert not made_up(0.01, seconds=(0.1, 0.2, 0.4)).fails


def test_cases_are_measured_beside_a_stream(
    tiny_model_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1 << 13)
    arguments = ["--model", str(with_api_tokenizer(tiny, tmp_path)), "--bytes", "2048", "--endpoint", "completions"]
    monkeypatch.setattr(fuzz_cost, "OPTIONS", {**fuzz_cost.OPTIONS, "num_threads": 1})
    chosen = ["--field", "allowed_token_ids", "--multiplier", "plain", "n"]
    monkeypatch.setattr(sys, "argv", ["fuzz_cost.py", *arguments, *chosen])
    with pytest.raises(SystemExit):
        fuzz_cost.main()
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])["fuzz_cost"]
    assert (record["cases"], record["never_answered"], record["unreached"]) == (2, 0, {})
    assert record["largest_gap_ms"] > 0 < record["largest_health_ms"]
    assert any(line.endswith("allowed_token_ids[], n") and " 200 " in line for line in lines)
