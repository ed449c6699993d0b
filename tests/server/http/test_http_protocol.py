"""Connections: early responses, exact limits, HTTP/1.0, upgrades and invalid requests, over plain sockets."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift import AsyncLLM
from chairlift.server.access.keys import Key, KeyInfo, KeyRing, digest
from chairlift.server.http.server_limits import ServerLimits
from running_server import RunningServer, run_server

LIMITS = ServerLimits(
    max_body_bytes=1 << 20,
    max_header_bytes=1024,
    header_timeout=0.6,
    body_timeout=1.5,
    write_timeout=1.0,
    max_unsent_bytes=128 << 10,
)
KEYS = KeyRing([Key(KeyInfo("ann", "ann", False), digest("secret"))])
AUTHORIZED = b"Host: x\r\nAuthorization: Bearer secret\r\n"
GET = b"GET /v1/models HTTP/1.1\r\n" + AUTHORIZED + b"\r\n"
BIG = b" " * (6 << 20)
"""More than the buffers of a loopback connection hold, and less than a lingering server discards."""


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    llm = AsyncLLM(model=str(tiny_model_dir("llama")), num_kv_blocks=60, skip_tokenizer_init=True, num_threads=1)
    with run_server(llm, "tiny", keys=KEYS, limits=LIMITS) as running:
        yield running


def exchange(server: RunningServer, *packets: bytes, until: bytes | None = None) -> bytes:
    """Send packets, and return the bytes that the server sends until it closes the connection or has sent `until`."""
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for packet in packets:
            connection.sendall(packet)
            time.sleep(0.01)
        received = b""
        while (until is None or until not in received) and (chunk := connection.recv(65536)):
            received += chunk
    return received


def statuses(received: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+)", received)]


def request(body: dict[str, Any], *headers: bytes, version: bytes = b"1.1") -> bytes:
    content = json.dumps({"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, **body}).encode()
    lines = [b"POST /v1/completions HTTP/" + version, b"Content-Type: application/json", *headers]
    return b"\r\n".join((*lines, AUTHORIZED + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)))


# -- lingering close ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "body", "status", "sentence"),
    [
        ({"Authorization": "Bearer secret"}, BIG, 413, "larger than 1048576 bytes"),
        ({"Authorization": "Bearer secret"}, iter([BIG[: 1 << 20]] * 6), 413, "larger than 1048576 bytes"),
        ({"Authorization": "Bearer wrong"}, BIG, 401, "API key"),
        ({"Authorization": "Bearer secret", "X": "y" * 1024}, BIG, 431, "more than 1024 bytes (max_header_bytes)"),
        ({"Authorization": "Bearer secret", "Content-Length": "1x"}, BIG, 400, "invalid"),
    ],
    ids=["too large", "too large in chunks", "without a key", "headers too large", "not valid"],
)
def test_a_client_that_sends_everything_first_reads_the_early_response(
    server: RunningServer, headers: dict[str, str], body: Any, status: int, sentence: str
) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    connection.request("POST", "/v1/completions", body=body, headers={"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    assert response.status == status
    assert sentence in json.loads(response.read())["error"]["message"]
    connection.close()


def test_late_headers_get_a_408_while_the_client_still_sends_them(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        deadline = time.monotonic() + 10
        connection.settimeout(0.01)
        received = b""
        while b"header_timeout" not in received:
            assert time.monotonic() < deadline
            connection.sendall(b"y")
            try:
                received += connection.recv(65536)
            except TimeoutError:
                continue
    assert statuses(received) == [408]


@pytest.mark.parametrize("is_sending", [True, False])
def test_a_lingering_close_ends(server: RunningServer, is_sending: bool) -> None:
    """It ends after a number of bytes, or of seconds."""
    head = b"POST /v1/completions HTTP/1.1\r\n" + AUTHORIZED + b"Content-Length: 99999999\r\n\r\n"
    connection = server.connect()
    connection.sendall(head)
    assert statuses(connection.recv(65536)) == [413]
    deadline = time.monotonic() + 10
    num_sent = 0
    while connections := server.uvicorn.server_state.connections:
        assert time.monotonic() < deadline, connections
        if is_sending:
            try:
                num_sent += connection.send(BIG)
            except OSError:
                break
        else:
            time.sleep(0.05)
    assert (num_sent > 8 * LIMITS.max_body_bytes) == is_sending
    connection.close()


def test_an_unread_body_does_not_keep_its_connection_open(server: RunningServer) -> None:
    received = exchange(server, GET.replace(b"\r\n\r\n", b"\r\nContent-Length: 9000\r\n\r\n"), b"x")
    assert statuses(received) == [200]


# -- limits of headers -------------------------------------------------------------------------------------------


def head_of(num_bytes: int, more: bytes = b"") -> bytes:
    start = GET[:-2] + more + b"X:"
    return start + b"y" * (num_bytes - len(start) - 4) + b"\r\n\r\n"


CHUNKED = request({}).partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKED += b'e;a=b\r\n{"prompt": [5]\r\n1\r\n}\r\n0\r\nTrailer: ' + b"t" * 900 + b"\r\n\r\n"
BEFORE = {
    "nothing": (b"", []),
    "empty lines": (b"\r\n\r\n\r\n", []),
    "a request": (GET, [200]),
    "a body with empty lines": (request({"user": "...."}).replace(b', "user": "...."', b"\r\n\r\n" * 4), [200]),
    "chunks and trailers": (CHUNKED, [200]),
}


@pytest.mark.parametrize("cut", ["whole", "in pieces", "before the last byte", "in the empty line"])
@pytest.mark.parametrize("before", BEFORE)
def test_the_limit_on_headers_is_exact(server: RunningServer, before: str, cut: str) -> None:
    sent, answers = BEFORE[before]
    size = LIMITS.max_header_bytes
    for num_bytes, status in ((size, 200), (size + 1, 431)):
        last = head_of(num_bytes, b"Connection: close\r\n")
        assert len(last) == num_bytes
        everything = sent + last
        places = {"whole": [], "before the last byte": [-1], "in the empty line": [-2]}.get(cut)
        if places is None:
            places = list(range(-len(everything) + 7, 0, 211))
        packets = [everything[a:b] for a, b in zip([None, *places], [*places, None], strict=True)]
        received = exchange(server, *packets)
        assert statuses(received) == [*answers, status]


def test_a_body_in_the_same_packet_is_not_counted_as_headers(server: RunningServer) -> None:
    received = exchange(server, request({"prompt": [5] * 50, "user": "u" * 5000}, b"Connection: close"))
    assert statuses(received) == [200]


def test_trailers_are_limited_and_are_not_headers(server: RunningServer) -> None:
    assert statuses(exchange(server, CHUNKED.replace(b"t" * 900, b"t" * 1100))) == [431]
    assert statuses(exchange(server, CHUNKED.replace(b"e;a=b", b"no size"))) == [400]
    spoofed = CHUNKED.replace(b"Trailer: ", b"Authorization: Bearer wrong\r\nHost: two\r\nT: ")
    with server.connect() as connection:
        for _ in range(2):
            connection.sendall(spoofed.replace(b"t" * 900, b""))
            assert statuses(connection.recv(65536)) == [200]


# -- many small parts in one packet --------------------------------------------------------------------------------


def test_pipelined_requests_and_chunks_of_one_byte_in_one_packet_are_all_answered(server: RunningServer) -> None:
    head, _, content = request({}).partition(b"Content-Length")
    content = content.partition(b"\r\n\r\n")[2] + b" " * 30_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    received = exchange(server, GET * 200 + chunked + GET * 200 + last)
    assert statuses(received) == [200] * 402
    assert received.count(b"completion_tokens") == 1


# -- versions and upgrades ---------------------------------------------------------------------------------------


def test_a_stream_to_a_client_of_http_1_0_is_delimited_by_the_close(server: RunningServer) -> None:
    for keep_alive in (b"X: y", b"Connection: keep-alive"):
        received = exchange(server, request({"stream": True}, keep_alive, version=b"1.0"))
        head, _, events = received.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        assert events.startswith(b"data: {")
        assert events.endswith(b"data: [DONE]\n\n")
    head, _, content = exchange(server, request({}, version=b"1.0")).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(content) in head.lower()


def test_a_stream_to_a_client_of_http_1_1_has_chunks(server: RunningServer) -> None:
    head, _, chunks = exchange(server, request({"stream": True}), until=b"\r\n0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    assert re.match(rb"[0-9a-f]+\r\ndata: ", chunks)


@pytest.mark.parametrize("pieces", [1, 2, 40])
def test_an_upgrade_is_ignored_and_the_connection_continues(server: RunningServer, pieces: int) -> None:
    upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA")
    sent = request({}, *upgrade) + GET.replace(b"\r\n\r\n", b"\r\n" + b"\r\n".join(upgrade) + b"\r\n\r\n")
    sent += request({}, b"Connection: close")
    size = -(-len(sent) // pieces)
    packets = [sent[start : start + size] for start in range(0, len(sent), size)]
    assert statuses(exchange(server, *packets)) == [200, 200, 200]


# -- invalid requests --------------------------------------------------------------------------------------------


def test_an_invalid_request_is_logged_with_its_peer(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), server.connect() as connection:
        port = connection.getsockname()[1]
        connection.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        received = connection.recv(65536)
    assert statuses(received) == [400]
    assert "the HTTP request is invalid: " in json.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if line.startswith(f"invalid HTTP request from 127.0.0.1:{port}: ")]
    assert "Invalid HTTP request received." not in lines


def test_the_connection_of_a_client_that_does_not_read_the_end_of_a_response_is_closed(server: RunningServer) -> None:
    """The unread end is too small to pause writing, so that only closing waits for it."""
    connection = server.connect(receive_buffer=2048)
    connection.sendall(b"GET /openapi.json HTTP/1.1\r\nConnection: close\r\n" + AUTHORIZED + b"\r\n")
    deadline = time.monotonic() + 15
    while not server.uvicorn.server_state.connections:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    while server.uvicorn.server_state.connections:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    connection.close()
