"""The memory of large requests is released, also if their clients leave."""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from chairlift.server.protocol.base import MAX_CONTENT_PARTS
from support.plain_http import NO_TLS
from support.served import Served, serve
from support.tiny_engine import tiny_options
from support.waiting import AMPLE_SECONDS, wait_for

NUM_CALLS = 4
NUM_TOOLS = 140_000
NUM_MESSAGES = 32
MAX_GROWTH_BYTES = 128 << 20
"""Less than the parsed bodies of two of the 8 calls (70 MiB each): memory must not grow with calls. About
30 MiB stay, probably in the arenas of Python's allocator, which are returned only when they have no object any more."""

PATH = "/v1/chat/completions"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes")


def rejected_body() -> bytes:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(NUM_TOOLS)]
    return json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": tools}).encode()


def valid_body() -> bytes:
    """A body whose parts have no text, and so no tokens."""
    parts = [{"type": "text", "text": ""}] * MAX_CONTENT_PARTS
    return json.dumps({"messages": [{"role": "user", "content": parts}] * NUM_MESSAGES, "max_tokens": 2}).encode()


def send_and_leave(served: Served, body: bytes) -> None:
    address = urlsplit(served.url)
    assert address.hostname is not None
    fields = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
    head = "\r\n".join([f"POST {PATH} HTTP/1.1", *fields, "", ""])
    with socket.create_connection((address.hostname, address.port or 80), timeout=AMPLE_SECONDS) as connection:
        connection.sendall(head.encode() + body)


def status_of(served: Served, body: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    return httpx.post(
        served.url + PATH, content=body, headers=headers, timeout=AMPLE_SECONDS, verify=NO_TLS
    ).status_code


def test_the_memory_of_large_requests_is_released(tmp_path: Path) -> None:
    bodies = [rejected_body(), valid_body()]
    options = tiny_options(tmp_path / "model", num_kv_blocks=24, max_model_len=128, served_model_name="tiny")
    with serve(options) as served, ThreadPoolExecutor(NUM_CALLS) as pool:
        before = sum(served.resident_bytes())
        list(pool.map(send_and_leave, [served] * NUM_CALLS, bodies * (NUM_CALLS // 2)))
        assert list(pool.map(status_of, [served] * NUM_CALLS, bodies * (NUM_CALLS // 2))) == [400, 200] * (
            NUM_CALLS // 2
        )
        wait_for(lambda: sum(served.resident_bytes()) - before < MAX_GROWTH_BYTES)
