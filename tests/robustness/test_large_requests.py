"""Large requests of disconnected clients do not delay others, and their memory is released."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from served import Served, serve

from plain_http import NO_TLS
from tiny_engine import tiny_options
from waiting import AMPLE_SECONDS, wait_for

NUM_CALLS = 12
NUM_TOOLS = 140_000
MAX_GROWTH_BYTES = 128 << 20
"""Less than the parsed bodies of two calls (70 MiB each): one may be kept, but memory must not grow with calls."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes")


def attack_body() -> bytes:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(NUM_TOOLS)]
    return json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": tools}).encode()


def send_and_leave(served: Served, body: bytes) -> None:
    address = urlsplit(served.url)
    assert address.hostname is not None
    fields = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
    head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *fields, "", ""])
    with socket.create_connection((address.hostname, address.port or 80), timeout=AMPLE_SECONDS) as connection:
        connection.sendall(head.encode() + body)


def complete(served: Served) -> float:
    """Return the seconds that a small completion takes."""
    body: dict[str, Any] = {"prompt": [3, 4, 5], "max_tokens": 20, "ignore_eos": True}
    started = time.monotonic()
    answer = httpx.post(f"{served.url}/v1/completions", json=body, verify=NO_TLS)
    assert answer.json()["usage"]["completion_tokens"] == 20
    return time.monotonic() - started


def test_large_tool_lists_do_not_delay_other_requests(tmp_path: Path) -> None:
    body = attack_body()
    options = tiny_options(tmp_path / "model", num_kv_blocks=24, max_model_len=128, served_model_name="tiny")
    with serve(options) as served:
        complete(served)
        before = sum(served.resident_bytes())
        callers = [threading.Thread(target=send_and_leave, args=(served, body)) for _ in range(NUM_CALLS)]
        for caller in callers:
            caller.start()
        during = [complete(served) for _ in range(10)]
        for caller in callers:
            caller.join()
        during += [complete(served) for _ in range(10)]
        wait_for(lambda: sum(served.resident_bytes()) - before < MAX_GROWTH_BYTES)
    assert max(during) < 60  # the calls took more than a minute before they were bounded
