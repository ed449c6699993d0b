"""Connections over plain sockets: early responses, headers without end, upgrades and invalid requests."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from uvicorn.server import ServerState

from chairlift import AsyncLLM
from chairlift.server.access.access_options import ServerLimits
from chairlift.server.access.keys import Key, KeyRing, digest
from chairlift.server.http.http_protocol import MAX_HEADER_BYTES, MAX_PIPELINED, HttpProtocol, uvicorn_config
from support.running_server import RunningServer, completion_body, run_server, until_closed
from support.waiting import AMPLE_SECONDS, wait_for

KEYS = KeyRing([Key("ann", digest("secret"))])
AUTHORIZED = b"Host: x\r\nAuthorization: Bearer secret\r\n"
GET = b"GET /v1/models HTTP/1.1\r\n" + AUTHORIZED + b"\r\n"
LAST_GET = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
BIG = b" " * (6 << 20)
"""More than the buffers of a loopback connection hold."""


@pytest.fixture(scope="module")
def server(tiny_llm: Callable[..., AsyncLLM]) -> Iterator[RunningServer]:
    with run_server(tiny_llm(), "tiny", keys=KEYS, limits=ServerLimits(max_body_bytes=1 << 20)) as running:
        yield running


def exchange(server: RunningServer, *packets: bytes) -> bytes:
    """Send packets, and return the bytes that the server sends until it closes the connection."""
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for packet in packets:
            connection.sendall(packet)
            time.sleep(0.01)
        return until_closed(connection)


def statuses(received: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+)", received)]


def request(body: dict[str, Any], *headers: bytes) -> bytes:
    content = json.dumps({**completion_body(3), **body}).encode()
    lines = [b"POST /v1/completions HTTP/1.1", b"Content-Type: application/json", *headers]
    return b"\r\n".join((*lines, AUTHORIZED + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)))


@pytest.mark.parametrize(
    ("secret", "body", "status", "sentence"),
    [
        ("secret", BIG, 413, "larger than 1048576 bytes (max_body_bytes)"),
        ("secret", iter([BIG[: 1 << 20]] * 6), 413, "larger than 1048576 bytes (max_body_bytes)"),
        ("wrong", BIG, 401, "API key"),
    ],
    ids=["too large", "too large in chunks", "without a key"],
)
def test_a_client_that_sends_everything_first_reads_the_early_response(
    server: RunningServer, secret: str, body: Any, status: int, sentence: str
) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=AMPLE_SECONDS)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}
    connection.request("POST", "/v1/completions", body=body, headers=headers)
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    assert (response.status, error["type"]) == (status, "invalid_request_error")
    assert sentence in error["message"]
    connection.request("GET", "/v1/models", headers={"Authorization": "Bearer secret"})
    assert connection.getresponse().status == 200, "the connection can be used again"
    connection.close()


def test_the_rest_of_a_rejected_body_uses_no_memory(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + AUTHORIZED + b"Content-Length: 99999999\r\n\r\n")
        assert statuses(connection.recv(65536)) == [413]
        wait_for(lambda: len(server.uvicorn.server_state.connections) == 1)  # Those of earlier tests are closed.
        (protocol,) = server.uvicorn.server_state.connections
        for _ in range(8):
            connection.sendall(BIG)
        assert len(protocol.cycle.body) == 0
    wait_for(lambda: not server.uvicorn.server_state.connections)


CHUNKED = request({}).partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /", b"x" * 1000),
        (b"GET / HTTP/1.1\r\n", b"X: yyyyyyyy\r\n" * 100),
        (b"GET / HTTP/1.1\r\nX: ", b"y" * 1000),
        (GET + b"GET / HTTP/1.1\r\nX: ", b"y" * 1000),
        (CHUNKED + b"1\r\n{\r\n0\r\nTrailer: ", b"t" * 1000),
        (CHUNKED + b"1;e=", b"e" * 1000),
    ],
    ids=["target", "headers", "header", "second request", "trailers", "chunk extension"],
)
def test_a_request_without_end_is_rejected_and_its_connection_closed(
    server: RunningServer, start: bytes, more: bytes
) -> None:
    num_sent = 0
    with server.connect() as connection:
        connection.sendall(start)
        wait_for(lambda: bool(server.uvicorn.server_state.connections))
        deadline = time.monotonic() + AMPLE_SECONDS
        try:
            while server.uvicorn.server_state.connections:
                assert time.monotonic() < deadline
                connection.sendall(more)
                num_sent += len(more)
        except OSError:
            pass
        assert statuses(until_closed(connection))[-1:] in ([], [400]), "a reset may overtake the response"
    assert num_sent > MAX_HEADER_BYTES / 2
    wait_for(lambda: not server.uvicorn.server_state.connections)


def test_a_body_is_not_counted_as_headers(server: RunningServer) -> None:
    large = request({"user": "u" * 200_000})
    packets = [large[start : start + 3000] for start in range(0, len(large), 3000)]
    assert statuses(exchange(server, *packets[:3], b"".join(packets[3:]), LAST_GET)) == [200, 200]


def test_pipelined_requests_and_chunks_of_one_byte_in_one_packet_are_all_answered(server: RunningServer) -> None:
    content = request({}).partition(b"\r\n\r\n")[2] + b" " * 3000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    received = exchange(server, GET * 50 + CHUNKED + chunks + b"0\r\n\r\n" + GET * 50 + LAST_GET)
    assert statuses(received) == [200] * 102
    assert received.count(b"completion_tokens") == 1


@pytest.mark.parametrize("separator", ["one packet", "two packets"])
def test_an_upgrade_to_http_2_is_ignored(server: RunningServer, separator: str) -> None:
    """The headers are those of Java's client, which sends them together."""
    upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AA", b"Upgrade: h2c")
    head, end, content = request({}, *upgrade).partition(b"\r\n\r\n")
    packets = [head + end + content] if separator == "one packet" else [head + end, content]
    assert statuses(exchange(server, *packets, LAST_GET)) == [200, 200]


@pytest.mark.parametrize("protocol", [b"websocket", b"H2C", b"other"])
def test_the_body_of_another_upgrade_is_no_second_request(server: RunningServer, protocol: bytes) -> None:
    upgrade = b"POST /v1/completions HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: " + protocol + b"\r\n"
    head = upgrade + AUTHORIZED + b"Content-Length: %d\r\n\r\n" % len(LAST_GET)
    assert statuses(exchange(server, head, LAST_GET)) == [400]


def test_too_many_pipelined_requests_close_the_connection(server: RunningServer) -> None:
    assert statuses(exchange(server, GET * (2 * MAX_PIPELINED))) == []
    assert statuses(exchange(server, LAST_GET)) == [200]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00 hello\r\n\r\n",
        request({}).replace(b"Content-Length: ", b"Content-Length: 1x"),
        CHUNKED + b"no size\r\n",
        GET.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"),
    ],
    ids=["TLS", "length", "chunk size", "two lengths"],
)
def test_an_invalid_request_gets_a_400(server: RunningServer, sent: bytes) -> None:
    assert statuses(exchange(server, sent)) == [400]


@pytest.mark.parametrize("more", [b"\0\r\n\r\n", GET + b"\0\r\n\r\n", b"GET /" + b"x" * 200_000])
def test_an_invalid_request_behind_a_stream_does_not_write_into_it(server: RunningServer, more: bytes) -> None:
    gate = server.hold_steps()
    gate.allow(2)
    with gate, server.connect() as connection:
        connection.sendall(request({"stream": True, "max_tokens": 200}))
        answer = connection.recv(4096)
        with contextlib.suppress(OSError):  # The server may close the connection before it has read everything.
            connection.sendall(more)
        answer += until_closed(connection)
    assert statuses(answer) == [200]
    server.wait_until_idle()


class UnreadTransport(asyncio.Transport):
    """A transport whose unsent bytes are set by a test."""

    def __init__(self, unsent: int) -> None:
        super().__init__()
        self.unsent = unsent
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.is_aborted = True


class ManualLoop:
    """An event loop whose timer expires when a test calls `expire`."""

    def __init__(self) -> None:
        self.expire: Callable[[], None] | None = None

    def call_later(self, _seconds: float, callback: Callable[..., None], *arguments: Any) -> ManualLoop:
        self.expire = partial(callback, *arguments)
        return self

    def cancel(self) -> None:
        self.expire = None


def test_a_connection_is_closed_when_its_client_reads_nothing() -> None:
    config = uvicorn_config(None, lifespan="off")
    loop, transport = ManualLoop(), UnreadTransport(3)
    protocol = HttpProtocol(config, ServerState(), {}, loop)  # type: ignore[arg-type]
    protocol.connection_made(transport)
    protocol.pause_writing()
    for unsent in (2, 1):
        transport.unsent = unsent
        assert loop.expire is not None
        loop.expire()
        assert not transport.is_aborted
    protocol.resume_writing()
    assert loop.expire is None
    protocol.pause_writing()
    assert loop.expire is not None
    loop.expire()
    assert transport.is_aborted
