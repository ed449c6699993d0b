"""Tests the live page of a recorded event log."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from chairlift.errors import ConfigError
from chairlift.server.web.page_language import Language
from chairlift.server.web.recorded_log import page_app, recorded_log_app
from support.recorded_logs import recorded_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return recorded_log(tmp_path)


def test_the_page_shows_the_log(log: Path) -> None:
    client = TestClient(recorded_log_app(log), base_url="http://127.0.0.1")
    assert client.get("/").status_code == 200
    view = client.get("/v1/page").json()
    assert view["recorded_log"] == "run.jsonl"
    assert not view["control"]
    assert client.get("/v1/page/log").text == log.read_text()


@pytest.mark.parametrize(("lang", "head"), [(None, "<html lang="), ("zh-TW", '<html data-lang="zh-TW" lang=')])
def test_the_page_names_the_language_of_the_command(log: Path, lang: Language | None, head: str) -> None:
    page = TestClient(recorded_log_app(log, lang=lang), base_url="http://127.0.0.1").get("/")
    assert head in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]


def test_other_hosts_are_rejected(log: Path) -> None:
    client = TestClient(recorded_log_app(log), base_url="http://attacker.example")
    assert client.get("/v1/page/log").status_code == 400


def test_another_host_answers_to_its_names(log: Path) -> None:
    for app in (recorded_log_app(log, "0.0.0.0"), page_app("two runs", "0.0.0.0")):
        assert TestClient(app, base_url="http://lab.example").get("/").status_code == 200
    assert TestClient(page_app("two runs"), base_url="http://127.0.0.1").get("/").text == "two runs"
    assert TestClient(page_app("two runs"), base_url="http://attacker.example").get("/").status_code == 400


@pytest.mark.parametrize(
    ("host", "name"), [("localhost", "localhost"), ("127.0.0.1", "localhost"), ("::1", "[::1]"), ("127.0.0.2",) * 2]
)
def test_every_host_of_the_loopback_interface_has_its_own_names_only(log: Path, host: str, name: str) -> None:
    for app in (recorded_log_app(log, host), page_app("two runs", host)):
        client = TestClient(app)
        assert client.get("/", headers={"host": f"{name}:8123"}).status_code == 200
        assert client.get("/", headers={"host": "attacker.example"}).status_code == 400


def test_a_file_that_is_no_event_log_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ConfigError, match=r"notes.txt, line 1"):
        recorded_log_app(path)
    with pytest.raises(ConfigError, match="No such file"):
        recorded_log_app(tmp_path / "missing.jsonl")
    path.write_text("")
    with pytest.raises(ConfigError, match=r"notes.txt: its first event must be engine_started"):
        recorded_log_app(path)
