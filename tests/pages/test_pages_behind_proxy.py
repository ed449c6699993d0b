"""Tests the pages in Chromium behind a proxy that publishes the server below a path, which it removes from requests."""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from support.running_server import RunningServer

BEGINNING = re.compile(rb"\A([A-Z]+) /(below/)?")


def without_prefix(request: bytes) -> bytes:
    """The request with another path. An answer must not be changed: a part of it may begin like a request."""
    return BEGINNING.sub(lambda found: found[1] + (b" /" if found[2] else b" /unknown/"), request)


def copy(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Copy bytes until one of the two connections ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(change(data))
    for connection in (source, target):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def url(server: RunningServer, page: Page) -> Iterator[str]:
    """The URL of the server behind the proxy, which ends after the page that loads from it."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with server.connect() as upstream:
                upstream.settimeout(None)
                threading.Thread(target=copy, args=(upstream, self.request, bytes), daemon=True).start()
                copy(self.request, upstream, without_prefix)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}/below"
        page.close()
        proxy.shutdown()


def test_all_pages_work_below_a_path(page: Page, url: str) -> None:
    page.goto(f"{url}/chat")
    page.fill("[name=max_tokens]", "3")
    page.get_by_role("textbox", name="Message").fill("Say hello.")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("link", name="its seat on the live page").click()
    expect(page.locator("#facts")).to_contain_text("finished")
    expect(page.locator("#status")).to_have_text("Live")
    page.get_by_role("link", name="API").click()
    expect(
        page.locator("#operations-Generation_and_embeddings-create_chat_completion_v1_chat_completions_post")
    ).to_be_visible()
    page.go_back()
    page.get_by_role("link", name="Chat").click()
    expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    assert page.url == f"{url}/chat"
