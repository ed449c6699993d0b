"""Commands and engine processes that run out of memory end with a message of one line."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.process import engine_process
from chairlift.engine.process.wire import EngineFailed
from chairlift.errors import ConfigError
from chairlift.system import memory_limits
from chairlift.system.memory_limits import check_address_space, describe_out_of_memory, is_out_of_memory

needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="needs resource limits as Linux has them")


def run_limited(num_mebibytes: int, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    import resource

    limit = num_mebibytes << 20
    return subprocess.run(
        [sys.executable, "-m", "chairlift", *arguments],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@needs_limits
@pytest.mark.parametrize("num_mebibytes", [36, 300, 1000])
@pytest.mark.parametrize("arguments", [["serve", "--port", "0"], ["generate", "hi"]])
def test_serve_under_a_small_address_space_prints_one_line(num_mebibytes: int, arguments: list[str]) -> None:
    """The smaller limits are reached during imports, at a point that depends on the machine."""
    done = run_limited(num_mebibytes, arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")
    assert "ulimit -v" in done.stderr
    assert done.stdout == ""


@needs_limits
def test_commands_without_an_engine_run_under_a_small_address_space() -> None:
    assert run_limited(300, ["key", "bob"]).returncode == 0


def limited(monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
    monkeypatch.setattr(memory_limits, "address_space_limit", lambda: num_bytes)


def test_a_too_small_address_space_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for enough in (None, 1 << 30):
        limited(monkeypatch, enough)
        check_address_space()
    limited(monkeypatch, (1 << 30) - 1)
    with pytest.raises(ConfigError, match=r"limited to 1024 MiB \(ulimit -v\), but an engine needs at least 1024 MiB"):
        check_address_space()


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_one", "is_one_under_a_limit"),
    [
        (MemoryError(), True, True),
        (MemoryError("std::bad_alloc"), True, True),
        (OSError(12, "Cannot allocate memory"), True, True),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True, True),
        (OSError("libgomp.so.1: failed to map segment from shared object"), True, True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True, True),
        (chained(ImportError("\n\nIMPORTANT: PLEASE READ THIS"), MemoryError()), True, True),
        (RuntimeError("can't start new thread"), False, True),
        (RuntimeError("Resource temporarily unavailable"), False, True),
        (SystemError("error return without exception set"), False, True),
        (OSError(28, "No space left on device"), False, False),
        (RuntimeError("size mismatch"), False, False),
        (ValueError("bad_alloc"), False, False),
    ],
)
def test_errors_that_mean_out_of_memory(
    error: Exception, is_one: bool, is_one_under_a_limit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, None)
    assert is_out_of_memory(error) == is_one
    assert "ulimit" not in describe_out_of_memory(error)
    limited(monkeypatch, 1 << 31)
    assert is_out_of_memory(error) == is_one_under_a_limit
    sentence = describe_out_of_memory(error)
    assert sentence.endswith("or increase the limit of the address space, 2048 MiB (ulimit -v)")
    assert "\n" not in sentence
    assert "IMPORTANT" not in sentence


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), RuntimeError("not enough memory: you tried")])
def test_an_engine_process_that_cannot_start_sends_one_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(_config: EngineConfig, _front_end: engine_process.FrontEndLink, _turn: object) -> Any:
        raise error

    monkeypatch.setattr(engine_process, "_build", build)
    link = FakeLink()
    run: Callable[..., int] = engine_process.run
    with caplog.at_level(logging.DEBUG):
        assert run(EngineConfig(), link) == 1
    (message,) = link.sent
    assert isinstance(message, EngineFailed)
    assert message.message.startswith(f"the engine cannot start: out of memory ({error}): free memory")
    assert not caplog.records
