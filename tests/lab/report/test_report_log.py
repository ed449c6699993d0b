"""Checks invalid event logs, labels, and the command `report`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import engine_started

from chairlift.errors import ChairliftError, ConfigError
from chairlift.events import Event, Step, to_json
from chairlift.lab.report.run_log import load_runs, read_log
from command_runner import invoke
from fakes import make_engine, make_request


def small_run(num_requests: int = 3) -> list[Event]:
    core, _, executor, log = make_engine(num_blocks=16, max_num_seqs=4)
    log.events.append(engine_started())
    submit = executor.submit
    executor.submit = lambda output: (submit(output), core._clock.advance(0.5))[0]  # type: ignore[method-assign]
    for index in range(num_requests):
        core.add(make_request(f"r{index}", [index] * 5, 3 + index))
    while core.has_work:
        core.step()
    return log.events


def write(path: Path, events: list[Event]) -> Path:
    path.write_text("".join(to_json(event) + "\n" for event in events), encoding="utf-8")
    return path


def changed(kind: type[Event], change: Callable[..., Event]) -> list[Event]:
    """A small run with its first event of a kind changed."""
    events = small_run()
    index = next(i for i, event in enumerate(events) if isinstance(event, kind))
    return [*events[:index], change(events[index]), *events[index + 1 :]]


def test_a_log_reads_back(tmp_path: Path) -> None:
    events = small_run()
    assert read_log(write(tmp_path / "a.jsonl", events)) == events


BAD_FILES = {
    "empty": (b"", "is empty"),
    "not json": (b"time,latency\n1,2\n", "line 1: "),
    "not text": (b"\x89PNG\xff\xfe", "line 1: not UTF-8"),
    "other json": (b'{"a": 1}\n', "line 1: type must be one of"),
    "second line": (to_json(engine_started()).encode() + b"\n{}\n", "line 2: type must be one of"),
    "no steps": (to_json(engine_started()).encode() + b"\n", "1 lines but no step"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_invalid_logs_are_rejected_with_file_and_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_log(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_log_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read: No such file"):
        read_log(tmp_path / "none.jsonl")


def test_a_log_must_have_exactly_one_beginning(tmp_path: Path) -> None:
    events = small_run()
    with pytest.raises(ConfigError, match=r"exactly one run, .* lines none"):
        read_log(write(tmp_path / "cut.jsonl", events[1:]))
    with pytest.raises(ConfigError, match=f"exactly one run, .* lines 1, {len(events) + 1}"):
        read_log(write(tmp_path / "two.jsonl", events * 2))


@pytest.mark.parametrize("fields", [{"num_computed": []}, {"request_ids": ["x"]}, {"admitted": ["x"]}])
def test_events_that_do_not_belong_together_are_rejected(tmp_path: Path, fields: dict[str, Any]) -> None:
    log = write(tmp_path / "a.jsonl", changed(Step, lambda step: replace(step, **fields)))
    with pytest.raises(ConfigError, match=r"a\.jsonl is damaged"):
        load_runs([str(log)])


def test_labels_are_distinct(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", small_run()), write(tmp_path / "b.jsonl", small_run())
    assert [run.label for run in load_runs([str(a)])] == ["continuous/paged"]
    both = ["continuous/paged (a)", "continuous/paged (b)"]
    assert [run.label for run in load_runs([str(a), str(b)])] == both
    assert [run.label for run in load_runs([f"mine={a}", str(b)])] == ["mine", "continuous/paged"]
    static = [replace(small_run()[0], batching="static", static_batch_size=8, kv="max"), *small_run()[1:]]
    assert load_runs([str(write(tmp_path / "s.jsonl", static))])[0].label == "static(8)/max"
    with pytest.raises(ConfigError, match="label 'mine' is used for several"):
        load_runs([f"mine={a}", f"mine={b}"])
    with pytest.raises(ConfigError, match=r"label 'continuous/paged \(a\)' is used for several"):
        load_runs([str(a), str(a)])
    with pytest.raises(ConfigError, match="must be PATH or LABEL=PATH"):
        load_runs([f"={a}"])


def test_a_path_may_contain_an_equals_sign(tmp_path: Path) -> None:
    path = write(tmp_path / "rate=2.jsonl", small_run())
    assert load_runs([str(path)])[0].label == "continuous/paged"


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "chairlift", "report", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_writes_the_pictures(tmp_path: Path) -> None:
    log, folder = write(tmp_path / "a.jsonl", small_run()), tmp_path / "pictures"
    done = command(f"mine={log}", str(log), "-o", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(folder / f"{name}.png") for name in ("batch", "memory", "latency")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_the_command_reports_errors_in_one_line(tmp_path: Path) -> None:
    none, log = tmp_path / "none.jsonl", write(tmp_path / "a.jsonl", small_run())
    done = command(none, "-o", tmp_path / "pictures")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: event log {none} cannot be read: No such file or directory"]
    error = invoke(["report", str(log), "-o", str(log)]).exception
    assert isinstance(error, ChairliftError)
    assert f"output {log / 'batch.png'} cannot be written" in str(error)


def test_the_live_page_shows_one_log(tmp_path: Path) -> None:
    log = write(tmp_path / "a.jsonl", small_run())
    error = invoke(["report", str(log), str(log)]).exception
    assert isinstance(error, ConfigError)
    assert "one event log, got 2" in str(error)


@pytest.mark.parametrize(
    ("module", "unwanted"), [("chairlift.cli.main", "matplotlib"), ("chairlift.lab.report.pictures", "torch")]
)
def test_imports_stay_light(module: str, unwanted: str) -> None:
    code = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
