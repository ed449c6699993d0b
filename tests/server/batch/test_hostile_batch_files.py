"""Inputs and outputs that are damaged, changed, very large, or not batch files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from batch_files import by_id, completion_line, request_line, write_lines

from chairlift import EngineConfig
from chairlift.errors import ConfigError
from chairlift.server.batch import batch_files as index_module
from chairlift.server.batch.batch_files import BatchIndex, BatchLineError, BatchOutput, answer_line
from chairlift.server.batch.batch_runner import run_batch
from support.tiny_engine import tiny_options

MEMORY_SCRIPT = """
import resource, sys
from pathlib import Path
from chairlift.server.batch.batch_files import BatchIndex, BatchOutput
from chairlift.errors import ConfigError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    BatchOutput(Path(sys.argv[2]), BatchIndex(Path(sys.argv[1])))
except ConfigError as error:
    print(error, file=sys.stderr)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def memory_of_opening(source: Path, target: Path) -> tuple[int, str]:
    """The MiB that index and output need in a new process, and the error."""
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout) >> 10, done.stderr


def test_byte_order_marks_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{completion_line(0)}\r\n{completion_line(1)}\r\n".encode())
    index = BatchIndex(path)
    assert index.mark_answered("r0")
    assert [number for number, _ in index.unanswered()] == [2]


def test_the_number_of_lines_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_LINES", 3)
    BatchIndex(write_lines(tmp_path / "in.jsonl", [completion_line(i) for i in range(3)]))
    with pytest.raises(ConfigError, match="has more than 3 lines: split it"):
        BatchIndex(write_lines(tmp_path / "in.jsonl", ["", "", "", completion_line(0)]))


def test_a_line_of_256_mebibytes_is_not_read_into_memory(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    with source.open("wb") as file:
        file.truncate(1 << 28)  # zeros, without a line end
    used, error = memory_of_opening(source, tmp_path / "out.jsonl")
    assert used < 160
    assert not error


def test_an_input_that_is_replaced_while_the_batch_runs_is_answered_as_it_was(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion_line(i) for i in range(4)])
    index = BatchIndex(path)
    path.unlink()
    os.mkfifo(path)
    assert [number for number, _ in index.unanswered()] == [1, 2, 3, 4]


def test_lines_that_are_appended_while_the_batch_runs_belong_to_the_next_run(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion_line(i) for i in range(2)])
    index = BatchIndex(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(completion_line(2) + "\n")
    assert [number for number, _ in index.unanswered()] == [1, 2]


def test_hostile_lines_are_answered_with_errors_beside_others(tmp_path: Path) -> None:
    start = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":'
    bodies = [b"[" * 100_000 + b"]" * 100_000, b'{"prompt":[5],"max_tokens":1e999}', b"null", b'"\\ud800"', b"\xff"]
    lines = [start % number + body + b"}" for number, body in enumerate(bodies)]
    lines += [b"\0" * 50, b'{"custom_id":"\\ud800"}', b"{" * 100_000, completion_line(9).encode("utf-16-le")]
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(b"\n".join([completion_line(0).encode(), *lines, completion_line(1).encode()]))
    summary = run_batch(EngineConfig(**tiny_options(tmp_path / "model", num_kv_blocks=60)), path, out)
    assert (summary.completed, summary.remaining) == (2, 0)
    assert summary.failed >= len(lines)
    index = BatchIndex(path)
    BatchOutput(out, index).close()
    assert index.num_unanswered == 0, "all of them have a result"


@pytest.mark.parametrize(
    "content",
    [
        b"one line, the only copy of something",
        b'{"id": 7, "text": "a document"}',
        b'{"a": 1}',
        b"\0" * 5000 + b"x",
        b" ",
    ],
)
def test_other_data_without_a_line_end_is_not_removed(tmp_path: Path, content: bytes) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion_line(0)])
    out = tmp_path / "out.jsonl"
    out.write_bytes(content)
    with pytest.raises(ConfigError, match="not a result of a batch"):
        BatchOutput(out, BatchIndex(path))
    assert out.read_bytes() == content


def test_a_large_file_without_lines_is_rejected_without_reading_it(tmp_path: Path) -> None:
    source, target = write_lines(tmp_path / "in.jsonl", [completion_line(0)]), tmp_path / "model.bin"
    with target.open("wb") as file:
        file.write(b"GGUF")
        file.truncate(1 << 30)
    used, error = memory_of_opening(source, target)
    assert "line 1: not a result of a batch" in error
    assert used < 40
    assert target.stat().st_size == 1 << 30


@pytest.mark.parametrize("start", [b"{", b'{"model": {"vocab"', b"", b'{"id":"batch_re'])
def test_a_large_file_that_starts_like_json_is_rejected_without_reading_it(start: bytes, tmp_path: Path) -> None:
    source, target = write_lines(tmp_path / "in.jsonl", [completion_line(0)]), tmp_path / "tokenizer.json"
    with target.open("wb") as file:
        file.write(start)
        file.truncate(1 << 29)
        file.seek(0, os.SEEK_END)
        file.write(b"}")
    used, error = memory_of_opening(source, target)
    assert "not a result of a batch" in error
    assert used < 40
    assert target.stat().st_size == (1 << 29) + 1


def test_an_output_that_is_removed_while_the_batch_runs_is_an_error(tmp_path: Path) -> None:
    index = BatchIndex(write_lines(tmp_path / "in.jsonl", [completion_line(0)]))
    output = BatchOutput(tmp_path / "out.jsonl", index)
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"out\.jsonl cannot be written: it was removed while the batch ran"):
        output.append([answer_line("r0")])
    output.close()


def test_links_to_the_input_are_the_input(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion_line(0)])
    (tmp_path / "soft").symlink_to(path)
    (tmp_path / "hard").hardlink_to(path)
    for name in ("soft", "hard"):
        with pytest.raises(ConfigError, match="is the input file"):
            BatchOutput(tmp_path / name, BatchIndex(path))
    assert BatchIndex(tmp_path / "soft").num_unanswered == 1


class FullDisk:
    """A file in which the n-th call of `write` or `fsync` fails, after some bytes of a write."""

    def __init__(self, file: Any, first_failure: int) -> None:
        self._file, self._left = file, first_failure

    def fail_once(self) -> bool:
        self._left -= 1
        return self._left == 0

    def write(self, data: Any) -> int:
        if self.fail_once():
            self._file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self._file.write(data[: max(1, 2 * len(data) // 3)]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def append_one_by_one(output: BatchOutput) -> None:
    for number in range(6):
        output.append([answer_line(f"r{number}")])


@pytest.mark.parametrize("first_failure", range(1, 13))
def test_a_batch_on_a_full_disk_is_resumed_and_answers_each_line_once(
    first_failure: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write_lines(tmp_path / "in.jsonl", [completion_line(i) for i in range(6)]), tmp_path / "out.jsonl"
    output = BatchOutput(out, BatchIndex(path))
    disk: Any = FullDisk(output._file, first_failure)
    fsync = os.fsync

    def full_fsync(descriptor: int) -> None:
        if disk.fail_once():
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    output._file = disk
    with monkeypatch.context() as patch:
        patch.setattr("chairlift.server.batch.batch_files.os.fsync", full_fsync)
        with pytest.raises(ConfigError, match=r"No space left on device\. All results so far are complete: make room"):
            append_one_by_one(output)
    output.close()
    assert out.read_bytes().endswith(b"\n") or not out.read_bytes()
    index = BatchIndex(path)
    again = BatchOutput(out, index)
    again.append([answer_line(f"r{number - 1}") for number, _ in index.unanswered()])
    again.close()
    assert by_id(out).keys() == {f"r{number}" for number in range(6)}


def test_a_line_that_was_corrected_after_its_error_is_not_skipped(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", ["not json", completion_line(1)])
    out = tmp_path / "out.jsonl"
    out.write_bytes(answer_line(None, error=BatchLineError("invalid_json_line", "x", 1)))
    index = BatchIndex(path)
    BatchOutput(out, index).close()
    assert index.num_unanswered == 1, "the line is unchanged"
    write_lines(path, [completion_line(0), completion_line(1)])
    with pytest.raises(
        ConfigError, match=r"line 1: result of line 1, which .* was changed .*remove this line to answer its"
    ):
        BatchOutput(out, BatchIndex(path))


def test_an_error_is_matched_by_line_number_and_custom_id(tmp_path: Path) -> None:
    wrong = request_line("lost", url="/v1/nowhere")
    out = tmp_path / "out.jsonl"
    out.write_bytes(answer_line("lost", error=BatchLineError("invalid_url", "x", 2)))
    index = BatchIndex(write_lines(tmp_path / "in.jsonl", [completion_line(0), wrong]))
    BatchOutput(out, index).close()
    assert [number for number, _ in index.unanswered()] == [1]
    moved = BatchIndex(write_lines(tmp_path / "moved.jsonl", [wrong, completion_line(0)]))
    with pytest.raises(ConfigError, match="result of line 2, which"):
        BatchOutput(out, moved)


def test_custom_ids_are_not_used_as_paths(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "/tmp/x", "a\0b", "line\nend", "\x1b[2J", "x" * 10_000]
    source = write_lines(tmp_path / "in.jsonl", [request_line(name, prompt=[5], max_tokens=1) for name in names])
    config = EngineConfig(**tiny_options(tmp_path / "model", num_kv_blocks=60))
    before = set(tmp_path.iterdir())
    run_batch(config, source, tmp_path / "out.jsonl")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "out.jsonl"}
    assert by_id(tmp_path / "out.jsonl").keys() == set(names)


def test_a_file_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion_line(0)])
    with pytest.raises(ConfigError, match="cannot be written: File name too long"):
        BatchOutput(tmp_path / ("x" * 300), BatchIndex(path))
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        BatchIndex(tmp_path / ("x" * 300))
