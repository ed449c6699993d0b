"""Tests the live page of a recorded event log."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from chairlift.errors import ConfigError
from chairlift.observability.event_log import encode_event
from chairlift.server.web.recorded_log import recorded_log_app, serve_recorded_log
from support.tracked_engine import TrackedEngine


@pytest.fixture
def log(tmp_path: Path) -> Path:
    engine = TrackedEngine()
    engine.add([1, 2], 3)
    engine.to_end()
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(encode_event(event) + b"\n" for event in engine.log.events))
    return path


def test_the_page_shows_the_log(log: Path) -> None:
    client = TestClient(recorded_log_app(log), base_url="http://127.0.0.1")
    assert client.get("/").status_code == 200
    view = client.get("/v1/page").json()
    assert view["recorded_log"] == "run.jsonl"
    assert not view["control"]
    assert client.get("/v1/page/log").text == log.read_text()


def test_other_hosts_are_rejected(log: Path) -> None:
    client = TestClient(recorded_log_app(log), base_url="http://attacker.example")
    assert client.get("/v1/page/log").status_code == 400


def test_a_file_that_is_no_event_log_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ConfigError, match=r"notes.txt, line 1"):
        serve_recorded_log(path, print)
    with pytest.raises(ConfigError, match="No such file"):
        serve_recorded_log(tmp_path / "missing.jsonl", print)
    path.write_text("")
    with pytest.raises(ConfigError, match=r"notes.txt: its first event must be engine_started"):
        serve_recorded_log(path, print)
