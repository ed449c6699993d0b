"""The soak with an attack, for some seconds on a tiny model; its figures and its checks. Speed is not tested."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.caller_isolation import BROKEN, LEFT
from benchmarks.server_process import Usage
from tools import soak_attack
from tools.soak_attack import AttackedSoak
from tools.soak_load import Tally

from benchmarks import caller_isolation
from server.api_model import with_api_tokenizer
from support.byte_tokenizer import VOCAB_SIZE

USAGE = Usage({"http": 1.0, "engine": 1.0}, {"http": 0, "engine": 0})


def made_up(statuses: Counter[int], tokens: int = 100, restarts: int = 0) -> AttackedSoak:
    tallies = {"alone": Tally(output_tokens=100), "attacked": Tally(Counter(answered=1), output_tokens=tokens)}
    usage = Usage(USAGE.cpu_seconds, USAGE.memory_growth, restarts)
    return AttackedSoak(tallies, {"alone": 10.0, "attacked": 20.0}, {"beams": statuses}, usage)


def test_lost_calls_and_restarts_fail() -> None:
    made_up(Counter({200: 1, LEFT: 1, 429: 1})).check()
    for lost in (made_up(Counter({500: 1})), made_up(Counter({BROKEN: 1})), made_up(Counter(), restarts=1)):
        with pytest.raises(AssertionError):
            lost.check()


def test_the_fair_share_is_half_of_the_throughput_alone() -> None:
    assert made_up(Counter(), tokens=100).share == pytest.approx(1.0)
    assert made_up(Counter(), tokens=80).share == pytest.approx(0.8)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_short_soak_loses_nothing(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1 << 13)
    model = str(with_api_tokenizer(tiny, tmp_path))
    monkeypatch.setattr(caller_isolation, "VOCABULARY", VOCAB_SIZE - 1)
    attacks = {name: caller_isolation.ATTACKS[name] for name in ("500,000 stop tokens", "640 kB, a 400")}
    monkeypatch.setattr(soak_attack, "ATTACKS", attacks)
    options = soak_attack.parse(["--minutes", "0.03", "--alone-minutes", "0.02", "--attackers", "1"])
    result = soak_attack.run(options, model, "--num-kv-blocks", "800", "--num-threads", "1", size=0.002)
    result.check()
    assert result.throughput("alone") > 0 < result.share
    assert sum(sum(found.values()) for found in result.attack.values()) >= 1
    assert result.figures()["attacked"]["answered"] == result.tallies["attacked"].outcomes["answered"]
