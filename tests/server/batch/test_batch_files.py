"""The input of a batch, the results in its output, and the state of the output after a crash."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_files import by_id, completion_line, request_line, results, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift import EngineConfig
from chairlift.core.engine_core import EngineCore
from chairlift.errors import ConfigError, EngineDeadError
from chairlift.server.access.access_options import ServerLimits
from chairlift.server.batch import batch_files as batch_files_module
from chairlift.server.batch.batch_files import (
    BatchIndex,
    BatchLineError,
    BatchOutput,
    BatchRequestInput,
    answer_line,
    parse_request,
)
from chairlift.server.batch.batch_runner import run_batch
from support.tiny_engine import tiny_options


def test_a_duplicate_is_reported_with_both_lines(tmp_path: Path) -> None:
    lines = [request_line("a"), "", request_line("b"), "no json", request_line("a", model="x"), "no json"]
    with pytest.raises(ConfigError, match=r"line 5: custom_id 'a' is that of line 1\. .*a different custom_id$"):
        BatchIndex(write_lines(tmp_path / "in.jsonl", lines))


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    index = BatchIndex(write_lines(tmp_path / "in.jsonl", ["", request_line("a"), "  ", "bad"]))
    assert [number for number, _ in index.unanswered()] == [2, 4]
    assert index.num_unanswered == 2


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("nonsense", "invalid_json_line"),
        ("[" * 100_000, "invalid_request"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}', "invalid_json_line"),
        ("[]", "invalid_request"),
        (request_line(7), "invalid_request"),
        (request_line("a", method="GET"), "invalid_request"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "invalid_request"),
        ('{"custom_id": "a", "method": "POST", "url": "/", "body": {}, "more": 1}', "invalid_request"),
    ],
)
def test_invalid_lines_give_an_error_code(line: str, code: str) -> None:
    error = parse_request(line.encode(), 3)
    assert isinstance(error, BatchLineError)
    assert (error.code, error.line) == (code, 3)


def test_a_line_is_not_much_longer_than_the_largest_body() -> None:
    largest = ServerLimits().max_body_bytes
    assert largest < batch_files_module.MAX_LINE_BYTES < 1.2 * largest


def test_a_line_that_is_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files_module, "MAX_LINE_BYTES", 300)
    long, short = request_line("long", prompt="x" * 1000), request_line("short", prompt="y")
    index = BatchIndex(write_lines(tmp_path / "in.jsonl", [long, short]))
    first, second = (parse_request(line, number) for number, line in index.unanswered())
    assert isinstance(first, BatchLineError)
    assert first.code == "line_too_long"
    assert isinstance(second, BatchRequestInput)
    assert second.custom_id == "short"


@pytest.mark.parametrize(
    "rest",
    [
        b"{",
        b'{"id":"batch_req_\0\0',
        b'{"id":"batch_req_1","custom',
        b"\0" * 5000,
        b'{"id":"batch_req_x","custom_id":"r1"}',
    ],
)
def test_an_incomplete_last_line_is_removed_and_answered_again(tmp_path: Path, rest: bytes) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion_line(i) for i in range(3)])
    out = tmp_path / "out.jsonl"
    out.write_bytes(answer_line("r2") + rest)
    index = BatchIndex(path)
    output = BatchOutput(out, index)
    assert (output.num_answered, output.num_removed_bytes, index.num_unanswered) == (1, len(rest), 2)
    output.append([answer_line("r0"), answer_line("r1")])
    output.close()
    assert by_id(out).keys() == {"r0", "r1", "r2"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{}\n", "line 1: not a result of a batch"),
        (answer_line("stranger"), "line 1: result of custom_id 'stranger'"),
        (answer_line(None), "line 1: result of no request"),
        (answer_line(None, error=BatchLineError("x", "y", 9)), "line 1: result of line 9"),
        (answer_line("r0") * 2, "line 2: result of custom_id 'r0'"),
    ],
    ids=["no answer", "stranger", "nothing", "line 9", "twice"],
)
def test_an_output_with_other_data_is_rejected_and_unchanged(tmp_path: Path, line: bytes, problem: str) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion_line(0)])
    out = tmp_path / "out.jsonl"
    out.write_bytes(line)
    with pytest.raises(ConfigError, match=problem):
        BatchOutput(out, BatchIndex(path))
    assert out.read_bytes() == line


def test_the_output_must_be_a_writable_file_without_another_writer(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion_line(0)])
    first = BatchOutput(tmp_path / "out.jsonl", BatchIndex(path))
    with pytest.raises(ConfigError, match="another process is writing this file"):
        BatchOutput(tmp_path / "out.jsonl", BatchIndex(path))
    first.close()
    with pytest.raises(ConfigError, match="is the input file"):
        BatchOutput(path, BatchIndex(path))
    for device in (tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a regular file"):
            BatchOutput(device, BatchIndex(path))
        with pytest.raises(ConfigError, match="is not a regular file"):
            BatchIndex(device)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        BatchOutput(tmp_path / "absent" / "out.jsonl", BatchIndex(path))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        BatchIndex(tmp_path / "absent.jsonl")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_line_is_answered_once_after_crashes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("crashes")
    ids = data.draw(st.lists(st.text(max_size=6), unique=True, min_size=1, max_size=12))
    path = write_lines(folder / "in.jsonl", [request_line(i) for i in ids])
    out = folder / "out.jsonl"
    for _crash in range(data.draw(st.integers(0, 4))):
        index = BatchIndex(path)
        output = BatchOutput(out, index)
        unanswered = [json.loads(line)["custom_id"] for _, line in index.unanswered()]
        output.append([answer_line(i) for i in data.draw(st.permutations(unanswered))])
        output.close()
        os.truncate(out, data.draw(st.integers(0, out.stat().st_size)))
    index = BatchIndex(path)
    output = BatchOutput(out, index)
    output.append([answer_line(json.loads(line)["custom_id"]) for _, line in index.unanswered()])
    output.close()
    assert sorted(by_id(out)) == sorted(ids)


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
