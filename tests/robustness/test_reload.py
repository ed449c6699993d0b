"""`chairlift serve` reopens its log files and reads its keys again after SIGHUP, and survives a closed terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from chairlift.server.access.keys import key_record, new_secret, to_toml
from support.plain_http import NO_TLS
from support.served import FAKE_COMMAND, Served, serve
from support.waiting import AMPLE_SECONDS, wait_for

OPTIONS = {"skip_tokenizer_init": True, "num_kv_blocks": 60, "num_threads": 1}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs terminals and signals as on Linux")


def complete(url: str, secret: str = "unused", **fields: Any) -> int:
    """The status of a completion."""
    body = {"prompt": [3, 4], "max_tokens": 3, "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer {secret}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=AMPLE_SECONDS, verify=NO_TLS)
    return answer.status_code


def has_call_in_progress(url: str, secret: str) -> bool:
    """Whether a prompt is in progress; needs an admin key."""
    answer = httpx.get(f"{url}/v1/engine", headers={"Authorization": f"Bearer {secret}"}, verify=NO_TLS)
    return answer.raise_for_status().json()["status"]["num_unfinished"] == 1


def send_sighup(server: Served) -> str:
    """Send SIGHUP, and return the log line of what was done."""

    def lines() -> list[str]:
        return [line for line in server.stderr_lines if "SIGHUP: " in line]

    count = len(lines())
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: len(lines()) > count)
    return lines()[-1]


def test_log_files_are_reopened_and_keys_are_read_again(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    key_file, (alice, bob) = tmp_path / "keys.toml", (new_secret(), new_secret())
    key_file.write_text(to_toml(key_record(alice, name="alice", admin=True)))
    names = ("event_log", "record_trace")
    paths = {name: tmp_path / name for name in names}
    rotated = {name: tmp_path / f"{name}.1" for name in names}
    options = OPTIONS | paths | {"model": tiny_model_dir("llama"), "api_key_file": key_file}
    with serve(options) as server, ThreadPoolExecutor(1) as pool:
        assert complete(server.url, alice) == 200
        (engine,) = psutil.Process(server.process.pid).children()
        engine.suspend()
        answer = pool.submit(complete, server.url, alice, max_tokens=20)
        wait_for(lambda: has_call_in_progress(server.url, alice))
        for name in names:
            paths[name].rename(rotated[name])
        key_file.write_text(f"{key_file.read_text()}\n\n{to_toml(key_record(bob, name='bob'))}")
        line = send_sighup(server)
        assert " INFO SIGHUP: files reopened: event_log (by the engine), record_trace (by the engine); " in line
        assert f"; 2 API keys were read from {key_file}" in line
        engine.resume()
        assert answer.result() == 200, "the answer in progress is complete"
        assert complete(server.url, bob) == 200
        key_file.write_text("[[keys]]\nname = 1\n")
        line = send_sighup(server)
        assert "files reopened: event_log" in line, "files that were not rotated are continued"
        assert "no API keys were read" in line
        assert any(f"ERROR api_key_file={key_file}: the API keys were not changed" in e for e in server.stderr_lines)
        assert complete(server.url, bob) == 200
    for name, text in ("record_trace", "arrival"), ("event_log", "request_finished"):
        assert [path.read_text().count(text) for path in (rotated[name], paths[name])] == [1, 3], name
    for line in (*rotated["event_log"].open(), *paths["event_log"].open()):
        json.loads(line)


def test_a_server_continues_with_a_closed_terminal(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    options = ["--skip-tokenizer-init", "--num-kv-blocks", "60", "--max-num-seqs", "8"]
    process = subprocess.Popen(
        [*FAKE_COMMAND, str(tiny_model_dir("llama")), *options],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    try:
        front = psutil.Process(process.pid)
        wait_for(lambda: bool(front.children()))
        process.send_signal(signal.SIGHUP)  # while the model is loaded
        text = b""
        while (found := re.search(rb"ready in \S+ s: (\S+)/v1 ", text)) is None:
            text += os.read(controller, 4096)
        url = found[1].decode()
        os.close(controller)
        for _ in range(3):
            assert complete(url) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(AMPLE_SECONDS) in (0, 120), "Python ends with 120 if standard error could not be written"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
