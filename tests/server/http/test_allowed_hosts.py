"""Valid Host headers, and the hosts that a server allows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from chairlift import AsyncLLM
from chairlift.errors import ConfigError
from chairlift.server.access.access_options import LOOPBACK_HOSTS, AccessOptions, parse_hosts
from chairlift.server.access.keys import Key, KeyRing, digest
from support.case_loop import loop_over
from support.command_runner import invoke
from support.running_server import RunningServer, open_options, run_server

KEYS = KeyRing([Key("ann", digest("secret"))])


@pytest.fixture(scope="module")
def server(tiny_llm: Callable[..., AsyncLLM]) -> Iterator[RunningServer]:
    """A server like `chairlift serve` without keys on the loopback, with CORS for every page."""
    hosts = AccessOptions().allowed_hosts_for("127.0.0.1")
    with run_server(tiny_llm(), "tiny", allowed_hosts=hosts, allowed_origins=("*",)) as running:
        yield running


def status_of(server: RunningServer, *lines: str) -> int:
    """Send a request of these lines, and return the status of the response."""
    with server.connect() as connection:
        connection.sendall("\r\n".join((*lines, "Connection: close", "", "")).encode("latin-1"))
        return int(connection.recv(65536).split()[1])


@loop_over(
    "host",
    ["localhost", "127.0.0.1", "localhost:8000", "LOCALHOST", "api.localhost", "[::1]", "[::1]:8000", "127.0.0.1:1"],
)
def test_names_of_the_loopback_are_allowed(server: RunningServer, host: str) -> None:
    assert status_of(server, "GET /health HTTP/1.1", f"Host: {host}") == 200


@loop_over(
    "host",
    ["rebound.example", "rebound.example:8000", "localhost.rebound.example", "notlocalhost", "127.0.0.1.example",
     "127.0.0.2", "[::2]", "192.168.0.1", "", "localhost..", ".localhost.example", "2130706433", "local host",
     "user@localhost", "localhost/", "localhost, localhost", "localhost:80x", "[::1", "::1", "localh\xf6st",
     "a" * 5000],
)  # fmt: skip
@loop_over("path", ["/health", "/v1/models"])
def test_another_name_is_rejected(server: RunningServer, host: str, path: str) -> None:
    assert status_of(server, f"GET {path} HTTP/1.1", f"Host: {host}") == 400


def test_the_error_names_the_host_and_the_option(server: RunningServer) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"Host": "chat.example:8000"})
    message = (
        "the Host header must name an allowed host: start the server with --allowed-hosts, or let the proxy send an "
        "allowed one, as with nginx's proxy_set_header; got 'chat.example:8000'"
    )
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    assert answer.headers["x-request-id"] == answer.headers["request-id"]


@loop_over("line", ["GET /health HTTP/1.1", "GET /health HTTP/1.0"])
def test_a_request_without_a_name_is_rejected(server: RunningServer, line: str) -> None:
    assert status_of(server, line) == 400


def test_a_preflight_with_a_foreign_name_is_rejected_too(server: RunningServer) -> None:
    lines = ("Origin: http://rebound.example", "Access-Control-Request-Method: POST")
    assert status_of(server, "OPTIONS /v1/completions HTTP/1.1", "Host: rebound.example", *lines) == 400
    assert status_of(server, "OPTIONS /v1/completions HTTP/1.1", "Host: localhost", *lines) == 200


@loop_over(
    ("options", "host", "allowed"),
    [
        ({}, "127.0.0.1", LOOPBACK_HOSTS),
        ({}, "127.0.0.2", (*LOOPBACK_HOSTS, "127.0.0.2")),
        ({}, "::1", LOOPBACK_HOSTS),
        ({"keys": KEYS}, "127.0.0.1", ("*",)),
        ({"allow_unauthenticated": True}, "127.0.0.1", ("*",)),
        ({"allow_unauthenticated": True}, "0.0.0.0", ("*",)),
        ({"allowed_hosts": ("api.example.com",)}, "127.0.0.1", ("api.example.com",)),
    ],
)
def test_default_and_explicit_hosts(options: dict[str, Any], host: str, allowed: tuple[str, ...]) -> None:
    assert AccessOptions(**options).allowed_hosts_for(host) == allowed


def test_patterns_are_spelled_as_browsers_do() -> None:
    assert parse_hosts("Example.COM, ::1 ,[0:0::2],*.Local,*") == ("example.com", "[::1]", "[::2]", "*.local", "*")


@loop_over("text", ["", " , ", "localhost:8000", "http://localhost", ".example.com", "a.*.b", "*x", "[x]"])
def test_invalid_patterns_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        parse_hosts(text)


def test_the_command_passes_the_hosts_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_API_KEY", raising=False)
    found: list[AccessOptions] = []
    monkeypatch.setattr("chairlift.server.serve.run", lambda options, *_: found.append(options.access))
    assert invoke(["serve", "--allowed-hosts", "a.example,*.b.example"]).exit_code == 0
    assert found[0].allowed_hosts_for("127.0.0.1") == ("a.example", "*.b.example")
    error = invoke(["serve", "--allowed-hosts", "a b"]).exception
    assert isinstance(error, ConfigError)
    assert re.search(r"allowed_hosts: 'a b' is not a host; write a name", str(error))


def test_calls_of_the_application_without_a_socket_are_allowed(server: RunningServer) -> None:
    """The command `batch` calls an application that allows every host."""
    from chairlift.server.application import create_app
    from chairlift.server.batch.batch_runner import client_of

    answer = asyncio.run(client_of(create_app(server.llm, open_options())).post("/detokenize", json={"tokens": [1]}))
    assert answer.status_code == 200
