"""benchmarks/caller_isolation.py on a tiny model with short attacks: each has a row and its figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.server_process import checkout_of

from benchmarks import caller_isolation
from server.api_model import with_api_tokenizer
from support.byte_tokenizer import VOCAB_SIZE

FIGURES = {
    "seconds",
    "largest_gap_s",
    "largest_health_s",
    "stream_failures",
    "http_cpu_s",
    "engine_cpu_s",
    "http_memory_mib",
    "engine_memory_mib",
    "engine_restarts",
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1 << 13)
    return with_api_tokenizer(tiny, tmp_path_factory.mktemp("isolation"))


def run(model: Path, monkeypatch: pytest.MonkeyPatch, *attacks: str) -> None:
    arguments = ["--size", "0.002", "--stream-tokens", "100", "--attack", *attacks, "--"]
    options = [str(model), "--num-kv-blocks", "800", "--num-threads", "1"]
    monkeypatch.setattr(sys, "argv", ["caller_isolation", *arguments, *options])
    monkeypatch.setattr(caller_isolation, "VOCABULARY", VOCAB_SIZE - 1)
    caller_isolation.main()


def test_an_attack_has_a_row_and_its_figures(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model, monkeypatch, "32 beams")
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])["caller_isolation"]
    ((beams,),) = record["attacks"].values()
    assert FIGURES | {"attacker", "other"} == beams.keys()
    assert (beams["attacker"]["failed"], beams["other"]["failed"]) == (0, 0)
    assert beams["other"]["calls"] == 1, "only the later call counts"
    assert min(beams["largest_gap_s"], beams["largest_health_s"], beams["engine_cpu_s"]) > 0
    assert beams["engine_restarts"] == 0
    assert record["served"]["version"] == checkout_of().version
    assert any("32 beams" in line and "200" in line for line in lines[:-1])
