"""benchmarks/before_after.py on a tiny model: the rounds of both sides, their order and their ratios."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from benchmarks.server_process import Checkout, server_process

from benchmarks import before_after
from server.api_model import with_api_tokenizer
from support.byte_tokenizer import VOCAB_SIZE


def test_arrivals_are_those_of_the_seed() -> None:
    times = before_after.arrival_times(50, 10.0, 1)
    assert times == before_after.arrival_times(50, 10.0, 1) == sorted(times)
    assert times != before_after.arrival_times(50, 10.0, 2)
    assert (len(times), min(times) >= 0, max(times) <= 10) == (50, True, True)


def test_the_ratio_of_each_round_is_after_over_before() -> None:
    results = {"before": [{"a": 2.0, "b": 0.0}, {"a": 4.0, "b": 1.0}], "after": [{"a": 1.0, "b": 1.0}] * 2}
    assert before_after.change_of(results, "a") == [0.5, 0.25]
    first, second = before_after.change_of(results, "b")
    assert first != first, "not a number"
    assert second == 1.0


def test_both_sides_are_measured_in_alternating_order(
    tiny_model_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1 << 10)
    model = str(with_api_tokenizer(tiny, tmp_path))
    sizes = ["--rounds", "2", "--streams", "2", "--input-len", "8", "--output-len", "4", "--chats", "5"]
    arguments = ["before_after", "--before-python", "other", *sizes, "--chat-seconds", "0.1"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr("benchmarks.http_cost.VOCABULARY", range(3, 200))
    monkeypatch.setattr(before_after, "checkout_of", lambda _python: Checkout("0", "0"))
    sides = []
    with server_process(model, "--num-kv-blocks", "500", "--num-threads", "1") as server:

        def serve(*_options: str, python: str | None) -> Any:
            sides.append(python)
            return nullcontext(server)

        monkeypatch.setattr(before_after, "server_process", serve)
        before_after.main()
    assert sides == ["other", None, None, "other"]
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["before_after"]
    for rounds in record["rounds"].values():
        assert len(rounds) == 2
        assert all(row["burst: output tokens/s"] > 0 and row["chats: answers a minute"] > 0 for row in rounds)
    assert record["after_over_before"].keys() == record["rounds"]["after"][0].keys()
    assert record["after_over_before"]["burst: output tokens/s"] == pytest.approx(
        before_after.change_of(record["rounds"], "burst: output tokens/s")
    )
