"""Valid Host headers, and the hosts that a server allows."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from chairlift import AsyncLLM
from chairlift.cli.main import app
from chairlift.errors import ConfigError
from chairlift.server.access.access_options import AccessOptions
from chairlift.server.access.keys import Key, KeyInfo, KeyRing, digest
from chairlift.server.http.allowed_hosts import AllowedHosts, host_name, parse_hosts
from chairlift.server.http.cors import CorsOptions
from running_server import RunningServer, run_server

KEYS = KeyRing([Key(KeyInfo("ann", "ann", False), digest("secret"))])


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    """A server like `chairlift serve` without keys on the loopback, with CORS for every page."""
    llm = AsyncLLM(model=str(tiny_model_dir("llama")), num_kv_blocks=60, skip_tokenizer_init=True, num_threads=1)
    hosts = AccessOptions().allowed_hosts_for("127.0.0.1")
    with run_server(llm, "tiny", allowed_hosts=hosts, cors=CorsOptions(allowed_origins=("*",))) as running:
        yield running


def send_lines(server: RunningServer, *lines: str) -> tuple[int, dict[str, Any]]:
    """Send a request of these lines, and return the status and body of the response."""
    with server.connect() as connection:
        connection.sendall("\r\n".join((*lines, "Connection: close", "", "")).encode("latin-1"))
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "localhost:8000", "LOCALHOST:", "localhost.", "LocalHost.:99999", "api.localhost",
     "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]", "127.0.0.1:1"],
)  # fmt: skip
def test_names_of_the_loopback_are_allowed(server: RunningServer, host: str) -> None:
    assert send_lines(server, "GET /health HTTP/1.1", f"Host: {host}")[0] == 200


@pytest.mark.parametrize(
    "host",
    ["rebound.example", "rebound.example:8000", "localhost.rebound.example", "notlocalhost", "127.0.0.1.example",
     "127.0.0.2", "[::2]", "192.168.0.1", "", "localhost..", ".localhost.example", "2130706433"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_foreign_name_is_rejected_and_the_error_names_it(server: RunningServer, host: str, path: str) -> None:
    status, body = send_lines(server, f"GET {path} HTTP/1.1", f"Host: {host}")
    assert status == 421
    assert body["error"]["code"] == "host_not_allowed"
    assert repr(host_name(host)) in body["error"]["message"]
    assert "only for localhost, 127.0.0.1, [::1], *.localhost: use one of these" in body["error"]["message"]
    assert "--allowed-hosts" in body["error"]["message"]


def test_a_preflight_with_a_foreign_name_is_rejected_too(server: RunningServer) -> None:
    lines = ("Origin: http://rebound.example", "Access-Control-Request-Method: POST")
    assert send_lines(server, "OPTIONS /v1/completions HTTP/1.1", "Host: rebound.example", *lines)[0] == 421
    assert send_lines(server, "OPTIONS /v1/completions HTTP/1.1", "Host: localhost", *lines)[0] == 200


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET /health HTTP/1.1"], 400),
        (["GET /health HTTP/1.1", "Host: localhost", "Host: localhost"], 400),
        (["GET /health HTTP/1.1", "Host: localhost", "host: rebound.example"], 400),
        (["GET /health HTTP/1.0", "Host: localhost", "Host: localhost"], 400),
        (["GET /health HTTP/1.0"], 200),
        (["GET /health HTTP/1.0", "Host: rebound.example"], 421),
        (["GET /health HTTP/1.1", "Host: local host"], 400),
        (["GET /health HTTP/1.1", "Host: user@localhost"], 400),
        (["GET /health HTTP/1.1", "Host: localhost/"], 400),
        (["GET /health HTTP/1.1", "Host: localhost, localhost"], 400),
        (["GET /health HTTP/1.1", "Host: localhost:80x"], 400),
        (["GET /health HTTP/1.1", "Host: [::1"], 400),
        (["GET /health HTTP/1.1", "Host: ::1"], 400),
        (["GET /health HTTP/1.1", "Host: [localhost]"], 400),
        (["GET /health HTTP/1.1", "Host: [1::2::3]"], 400),
        (["GET /health HTTP/1.1", "Host: localh\xf6st"], 400),
        (["GET http://localhost/health HTTP/1.1", "Host: localhost"], 200),
        (["GET HTTP://LOCALHOST:80/health HTTP/1.1", "Host: rebound.example"], 200),
        (["GET http://rebound.example/health HTTP/1.1", "Host: localhost"], 421),
        (["GET http://localhost@rebound.example/health HTTP/1.1", "Host: localhost"], 400),
        (["GET http://localhost/health HTTP/1.1"], 400),
    ],
)
def test_host_headers_follow_the_standard(server: RunningServer, lines: list[str], status: int) -> None:
    """RFC 9112, section 3.2; an absolute target takes precedence over the header (section 3.2.2)."""
    assert send_lines(server, *lines)[0] == status


def test_a_long_host_is_shortened_in_the_error(server: RunningServer) -> None:
    for host in ("a" * 5000, "/" * 5000):
        assert len(send_lines(server, "GET /health HTTP/1.1", f"Host: {host}")[1]["error"]["message"]) < 400


def test_clients_can_connect_by_address_and_name(server: RunningServer) -> None:
    assert server.client().models.list().data[0].id == "tiny"
    assert httpx.get(server.url.replace("127.0.0.1", "localhost") + "/health").status_code == 200


@pytest.mark.parametrize(
    ("options", "host", "allowed", "rejected"),
    [
        ({}, "127.0.0.1", ["localhost", "127.0.0.1", "[::1]", "x.localhost"], ["example.com", "127.0.0.2"]),
        ({}, "127.0.0.2", ["127.0.0.2", "localhost"], ["127.0.0.3"]),
        ({}, "::1", ["[::1]"], ["example.com"]),
        ({"keys": KEYS}, "127.0.0.1", ["example.com"], []),
        ({"allow_unauthenticated": True}, "127.0.0.1", ["example.com"], []),
        ({"allow_unauthenticated": True}, "0.0.0.0", ["example.com"], []),
        ({"allowed_hosts": AllowedHosts(("api.example.com",))}, "127.0.0.1", ["api.example.com"], ["localhost"]),
        ({"keys": KEYS, "allowed_hosts": AllowedHosts(("*.example.com",))}, "0.0.0.0", ["a.b.example.com"],
         ["example.com", "xexample.com"]),
        ({"allowed_hosts": AllowedHosts(("*",))}, "127.0.0.1", ["example.com"], []),
    ],
)  # fmt: skip
def test_default_and_explicit_hosts(
    options: dict[str, Any], host: str, allowed: list[str], rejected: list[str]
) -> None:
    hosts = AccessOptions(**options).allowed_hosts_for(host)
    assert [name for name in (*allowed, *rejected) if (host_name(name) or "") in hosts] == allowed


def test_patterns_have_one_spelling() -> None:
    hosts = AllowedHosts(parse_hosts("Example.COM., ::1 ,[0:0::2],*.Local,example.com,[::1]"))
    assert hosts.patterns == ("example.com", "[::1]", "[::2]", "*.local")


@pytest.mark.parametrize(
    "text", ["", " , ", "localhost:8000", "http://localhost", ".example.com", "a.*.b", "*x", "[x]"]
)
def test_invalid_patterns_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        AllowedHosts(parse_hosts(text))


def test_the_command_passes_the_hosts_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_API_KEY", raising=False)
    found: list[AccessOptions] = []
    monkeypatch.setattr("chairlift.server.serve.run", lambda _config, **options: found.append(options["access"]))
    assert CliRunner().invoke(app, ["serve", "--allowed-hosts", "a.example,*.b.example"]).exit_code == 0
    assert found[0].allowed_hosts_for("127.0.0.1").patterns == ("a.example", "*.b.example")
    error = CliRunner().invoke(app, ["serve", "--allowed-hosts", "a b"]).exception
    assert isinstance(error, ConfigError)
    assert re.search(r"allowed_hosts: 'a b' is not a host; write a name", str(error))


def test_calls_of_the_application_without_a_socket_are_allowed(server: RunningServer) -> None:
    """The command `batch` calls an application that allows every host."""
    from chairlift.server.application import create_app
    from chairlift.server.batch.line_processor import post

    answer = asyncio.run(post(create_app(server.llm), "/detokenize", b'{"tokens": [1]}'))
    assert answer.status == 200
