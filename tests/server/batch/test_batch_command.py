"""`chairlift batch` gives the same results as the server, and can be resumed after any interruption."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_files import by_id, completion_line, request_line, results, write_lines

from chairlift import AsyncLLM, EngineConfig
from chairlift.server.batch.batch_runner import cancelled_by_signals, run_batch
from support.command_runner import invoke
from support.running_server import run_server
from support.tiny_tokenizer import add_tokenizer
from support.waiting import AMPLE_SECONDS, wait_for

ENGINE = {"num_kv_blocks": 120, "num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64}
NUM_LINES = 55


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(add_tokenizer(tiny_model_dir("llama"), tmp_path_factory.mktemp("words")))


def command(model: str, source: Path, target: Path) -> list[str]:
    options = [word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["batch", str(source), "-o", str(target), "--model", model, *options]


def start(model: str, source: Path, target: Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "chairlift", *command(model, source, target)], text=True, **options)


def without_id(body: Any) -> Any:
    """A response body without its id and time."""
    return {key: value for key, value in body.items() if key not in ("id", "created")}


LINES = [
    request_line("text", prompt="one two", max_tokens=3, temperature=0),
    request_line("chat", url="/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=3, seed=1),
    request_line("several", prompt=["a", "b"], n=2, max_tokens=2, seed=5, logprobs=1),
    request_line("wrong field", prompt="a", colour="red"),
    request_line("too long", prompt=[3] * 10_000),
    request_line("other model", prompt="a", model="other"),
]
BAD = [
    request_line("lost", url="/v1/nowhere", prompt="a"),
    request_line("stream", prompt="a", stream=True),
    "not json",
    request_line("got", method="GET"),
]


def test_results_equal_the_responses_of_the_server(model: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [*LINES, *BAD])
    summary = run_batch(EngineConfig(model=model, **ENGINE), source, tmp_path / "out.jsonl", "words")
    assert (summary.completed, summary.failed, summary.remaining) == (3, 7, 0)
    found = by_id(tmp_path / "out.jsonl")
    with run_server(AsyncLLM(model=model, **ENGINE), "words") as server:
        for line in LINES:
            request = json.loads(line)
            expected = server.post(request["url"], request["body"])
            got = found[request["custom_id"]]
            assert got["error"] is None
            assert got["response"]["status_code"] == expected.status_code
            assert without_id(got["response"]["body"]) == without_id(expected.json())
            if expected.status_code == 200:
                assert got["response"]["request_id"]
    assert found["stream"]["response"]["status_code"] == 400
    assert found["stream"]["response"]["body"]["error"]["param"] == "stream"
    errors = {
        key: (answer["error"]["code"], answer["error"]["line"]) for key, answer in found.items() if answer["error"]
    }
    assert errors == {"lost": ("invalid_url", 7), None: ("invalid_json_line", 9), "got": ("invalid_request", 10)}
    assert "/v1/chat/completions" in found["lost"]["error"]["message"]


def test_lines_are_answered_concurrently(model: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion_line(i, 24) for i in range(40)])
    log = tmp_path / "events.jsonl"
    run_batch(EngineConfig(model=model, event_log=log, **ENGINE), source, tmp_path / "out.jsonl")
    steps = [event for event in map(json.loads, log.open()) if event["type"] == "step"]
    # The batch sizes depend on the machine; lines that are answered one after another would give 1.
    assert max(len(step["request_ids"]) for step in steps) == ENGINE["max_num_seqs"]
    assert sum(len(step["request_ids"]) for step in steps) > len(steps)


def test_a_killed_batch_is_resumed(model: str, tmp_path: Path) -> None:
    lines = [*(completion_line(i, 40) for i in range(NUM_LINES)), "not json"]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = start(model, source, target, stderr=subprocess.DEVNULL)
    wait_for_lines(target, 12, process)
    process.kill()
    process.wait()
    kept = results(target)
    assert len(kept) >= 12
    with target.open("ab") as file:
        file.write(b'{"id":"batch_req_torn","custom_id":"r')
    again = invoke(command(model, source, target))
    assert f"{len(kept)} done in earlier runs, 0 remaining" in again.stderr
    assert results(target)[: len(kept)] == kept, "existing results are kept"
    assert by_id(target).keys() == {f"r{i}" for i in range(NUM_LINES)} | {None}

    whole = tmp_path / "whole.jsonl"
    run_batch(EngineConfig(model=model, **ENGINE), source, whole)
    texts = [
        {key: answer["response"] and answer["response"]["body"]["choices"] for key, answer in by_id(path).items()}
        for path in (target, whole)
    ]
    assert texts[0] == texts[1]
    before = target.read_bytes()
    assert run_batch(EngineConfig(model=model, **ENGINE), source, target).previously_done == NUM_LINES + 1
    assert target.read_bytes() == before, "no line is answered twice"


def test_a_batch_ended_by_a_signal_reports_the_remaining_lines(model: str, tmp_path: Path) -> None:
    lines = [completion_line(i, 200) for i in range(300)]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = start(model, source, target, stderr=subprocess.PIPE)
    wait_for_lines(target, 4, process)
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=AMPLE_SECONDS)
    assert process.returncode == 1
    count = len(results(target))
    assert f"{count} completed, 0 failed, 0 done in earlier runs, {300 - count} remaining" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_cancels_the_task_even_if_it_was_ignored_before(number: signal.Signals) -> None:
    async def wait() -> None:
        with cancelled_by_signals():
            signal.raise_signal(number)
            await asyncio.sleep(AMPLE_SECONDS)

    before = signal.signal(number, signal.SIG_IGN)
    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(wait())
        assert signal.getsignal(number) is (signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    finally:
        signal.signal(number, before)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[Any]) -> None:
    def has_lines() -> bool:
        has_ended = process.poll() is not None
        found = path.exists() and path.read_bytes().count(b"\n") >= count
        assert found or not has_ended
        return found

    wait_for(has_lines)


def test_an_invalid_input_is_reported_before_the_model_is_loaded(tmp_path: Path, smollm2_gguf: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion_line(0), completion_line(0)])
    error = invoke(
        ["batch", str(source), "-o", str(tmp_path / "no" / "out.jsonl"), "--model", str(smollm2_gguf)]
    ).exception
    assert "line 2: custom_id 'r0' is that of line 1" in str(error)
