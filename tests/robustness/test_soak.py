"""Short runs of the soak tests with one seed. The long runs are `make soak` and `make soak-attack`."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.caller_isolation import BROKEN, LEFT
from benchmarks.server_process import Usage
from tools import soak_attack
from tools.soak import check_descriptors, serve_models, soak
from tools.soak_attack import AttackedSoak
from tools.soak_calls import SoakCalls
from tools.soak_load import Tally

from benchmarks import caller_isolation
from server.api_model import with_api_tokenizer
from support.byte_tokenizer import VOCAB_SIZE

ROUNDS = 2


def test_nothing_is_left_of_many_requests(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    rounds = iter(range(ROUNDS))
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    chat_model = with_api_tokenizer(tiny, tmp_path / "chat")
    with serve_models(tmp_path, str(chat_model)) as served:
        calls = SoakCalls(served.url, tmp_path / "adapter", seed=3)
        result = asyncio.run(soak(served, calls, 4, lambda: next(rounds, None) is not None, size=0.1))
    check_descriptors(result)
    tally = result.tally
    assert tally.outcomes["answered"] > tally.num_requests / 2
    assert min(tally.outcomes["aborted"], tally.outcomes["rejected"], tally.kinds["structured_outputs"]) > 0
    assert sum(result.calls.values()) == 12 * ROUNDS


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
