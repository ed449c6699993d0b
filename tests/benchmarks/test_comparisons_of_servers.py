"""Benchmarks that compare two servers, on one server of a tiny model: before_after.py and equal_answers.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from benchmarks.server_process import Checkout, ServerProcess, server_process

from benchmarks import before_after, equal_answers
from server.api_model import with_api_tokenizer
from support.byte_tokenizer import VOCAB_SIZE


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1 << 10)
    model = str(with_api_tokenizer(tiny, tmp_path_factory.mktemp("compared")))
    with server_process(model, "--num-kv-blocks", "500", "--num-threads", "1", "--seed", "0") as running:
        yield running


def test_both_sides_are_measured_in_alternating_order(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--rounds", "2", "--streams", "2", "--input-len", "8", "--output-len", "4", "--chats", "5"]
    arguments = ["before_after", "--before-python", "other", *sizes, "--chat-seconds", "0.1"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr("benchmarks.http_cost.VOCABULARY", range(3, 200))
    monkeypatch.setattr(before_after, "checkout_of", lambda _python: Checkout("0", "0"))
    sides = []

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


def test_a_server_gives_the_same_answers_twice(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["equal_answers", "--before-python", sys.executable, "--calls", "12"])
    monkeypatch.setattr(equal_answers, "server_process", lambda *_options, python: nullcontext(server))
    assert equal_answers.main() == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["equal_answers"]
    assert (record["calls"], record["different"], record["differences"]) == (12, 0, [])
    assert sum(record["statuses"].values()) == 12
    assert record["statuses"]["200"] >= 8
