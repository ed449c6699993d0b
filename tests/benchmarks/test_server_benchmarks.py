"""Benchmarks of servers, on one server of a tiny model: comparisons of two servers, fairness and isolation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.equal_answers import Comparison, RandomCall, make_calls, normalized
from benchmarks.server_process import Checkout, ServerProcess, checkout_of, server_process

from benchmarks import before_after, caller_isolation, equal_answers, fairness
from server.api_model import with_api_tokenizer
from support.byte_tokenizer import VOCAB_SIZE


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1 << 13)
    model = str(with_api_tokenizer(tiny, tmp_path_factory.mktemp("compared")))
    sizes = ["--num-kv-blocks", "800", "--num-threads", "1"]
    with server_process(model, *sizes, "--seed", "0", "--served-model-name", "m") as running:
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


CALL = RandomCall("/v1/completions", {"prompt": "x"}, frozenset({"text"}))
KINDS = {"list of prompts", "n > 1", "beams", "stream", "truncated", "logprobs", "prompt_logprobs", "stop_token_ids"}


def chunk(index: int, text: str, reason: str | None = None, **fields: object) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": reason, "logprobs": {"tokens": [text]}}
    return b"data: " + json.dumps({"id": "1", "choices": [choice], **fields}).encode() + b"\n\n"


def test_the_calls_are_those_of_the_seed_and_of_all_kinds() -> None:
    calls = make_calls(300, 1)
    assert calls == make_calls(300, 1)
    assert calls != make_calls(300, 2)
    kinds = set().union(*(call.kinds for call in calls))
    assert kinds > KINDS
    assert all("seed" in call.body for call in calls)
    assert any(len(set(ids)) < len(ids) for call in calls if (ids := call.body.get("stop_token_ids")))


def test_ids_and_times_are_no_difference_and_all_else_is() -> None:
    first = normalized(200, b'{"id":"a","created":5,"text":"x","usage":{"cached_tokens":3}}')
    assert first == normalized(200, b'{"id":"b","created":6,"text":"x","usage":{"cached_tokens":0}}')
    assert first != normalized(200, b'{"id":"a","created":5,"text":"y","usage":{"cached_tokens":3}}')
    assert first != normalized(400, b'{"id":"a","created":5,"text":"x","usage":{"cached_tokens":3}}')


def test_chunks_of_a_stream_are_joined() -> None:
    done = b"data: [DONE]\n\n"
    one = chunk(0, "ab") + chunk(1, "c") + chunk(0, "d", "stop") + done
    other = chunk(1, "c") + chunk(0, "abd", "stop") + done
    joined = normalized(200, one)
    assert json.loads(joined[4:])["choices"][0]["text"] == "abd"
    assert json.loads(joined[4:])["choices"][0]["logprobs"] == {"tokens": ["ab", "d"]}
    assert json.loads(joined[4:])["choices"][0]["finish_reason"] == "stop"
    assert json.loads(normalized(200, other)[4:])["choices"][0]["text"] == "abd"
    assert joined != normalized(200, one.removesuffix(done)), "a stream without its end differs"


def test_differences_are_counted_by_kind() -> None:
    comparison = Comparison()
    comparison.add(CALL, b"200 same", b"200 same")
    comparison.add(CALL, b"200 one", b"200 other")
    assert comparison.figures()["kinds"] == {"all": [2, 1], "text": [2, 1]}
    assert comparison.figures()["differences"][0]["answers"] == ["200 one", "200 other"]


def test_a_flood_has_twenty_times_as_many_requests_of_one_key() -> None:
    workload = fairness.TwoKeyWorkload(rate=5.0, seconds=60.0, input_len=8, output_len=4)
    light, flood = workload.arrivals("light", 1), workload.arrivals("heavy", 20)
    assert light == workload.arrivals("light", 1) == sorted(light)
    assert 15 < len(flood) / len(light) < 27
    assert max(flood) < 60


def test_runs_are_measured_on_a_server_and_drawn(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = fairness.TwoKeyWorkload(rate=6.0, seconds=0.8, input_len=8, output_len=4)
    monkeypatch.setattr(fairness, "VOCABULARY", 90)
    monkeypatch.setattr(fairness, "POLICIES", ("fair",))
    monkeypatch.setattr(fairness, "serve", lambda *_options: nullcontext(server.url))
    runs = fairness.run_policies(workload, [])
    assert [(run.policy, run.times_as_much) for run in runs] == [("fair", 1), ("fair", 20)]
    for run in runs:
        assert run.num_sent["light"] == len(run.calls["light"]) == len(workload.arrivals("light", 1))
        assert run.num_sent["heavy"] == len(workload.arrivals("heavy", run.times_as_much))
    runs += [replace(run, policy="fcfs") for run in runs]
    flooded = fairness.find_run(runs, "fair", 20).ttft("light", 50)
    assert fairness.claims(runs) == {
        "fair_flood_over_equal": flooded / fairness.find_run(runs, "fair", 1).ttft("light", 50),
        "fair_flood_over_fcfs_flood": 1.0,
    }
    fairness.draw(runs, workload, tmp_path / "fairness.png")
    assert (tmp_path / "fairness.png").stat().st_size > 10_000


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


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_an_attack_has_a_row_and_its_figures(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--size", "0.002", "--stream-tokens", "100", "--attack", "32 beams"]
    monkeypatch.setattr(sys, "argv", ["caller_isolation", *sizes])
    monkeypatch.setattr(caller_isolation, "VOCABULARY", VOCAB_SIZE - 1)
    monkeypatch.setattr(caller_isolation, "server_process", lambda *_options, python: nullcontext(server))
    caller_isolation.main()
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
