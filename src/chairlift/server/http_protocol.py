"""uvicorn's HTTP protocol, for clients that take their time: each of them costs a descriptor, and only so long.

connect ---- header_timeout ----> headers complete ---- body_timeout (BodyLimitMiddleware) ----> answer
                                                                                                    |
cut off <---- write_timeout without taking a byte, while max_unsent_bytes wait to be sent <---------+
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chairlift.server.event_loop import BoundedTlsConfig
from chairlift.server.limits import ServerLimits


class _Timer:
    """Calls once, later, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float, function: Callable[[], None]) -> None:
        self.stop()
        self._handle = self._loop.call_later(seconds, function)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `limits` is set by `guarded`."""

    limits = ServerLimits()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_bytes = 0
        self._in_headers = True
        self._header_timer = _Timer(self.loop)
        self._stall_timer = _Timer(self.loop)
        self._unsent = 0

    # -- slow headers --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bound_buffers(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
            if not self._header_timer.is_running:
                self._wait_for_headers()
        super().data_received(data)
        if self._in_headers and self._header_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
            self._refuse(431, b"Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_timer.stop()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True
        self._header_bytes = 0

    def _wait_for_headers(self) -> None:
        self._header_timer.start(self.limits.header_timeout, self._headers_are_late)

    def _headers_are_late(self) -> None:
        """The next request's may begin to come while this one is answered."""
        if self._is_answering:
            self._wait_for_headers()
        elif not self.transport.is_closing():
            self._refuse(408, b"Request Timeout")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, reason: bytes) -> None:
        if self._is_answering:
            self.transport.abort()
            return
        line = b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % (status, reason)
        self.transport.write(line)
        self.transport.close()

    # -- slow readers --------------------------------------------------------------------------------------------

    def _bound_buffers(self, transport: asyncio.Transport) -> None:
        """Bytes that wait here, and in the system's own buffer, which would else grow to megabytes."""
        transport.set_write_buffer_limits(high=self.limits.max_unsent_bytes // 2)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.max_unsent_bytes // 4)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer.stop()

    def _watch_reader(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._stall_timer.start(self.limits.write_timeout, self._reader_is_late)

    def _reader_is_late(self) -> None:
        """Whoever took something gets as long again; closing would wait for the buffer to empty."""
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch_reader()
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_timer.stop()
        self._stall_timer.stop()
        super().connection_lost(exc)


def guarded(limits: ServerLimits) -> type[GuardedProtocol]:
    """The protocol with these limits."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})


def uvicorn_config(app: Any, limits: ServerLimits, tls: ssl.SSLContext | None = None, **options: Any) -> uvicorn.Config:
    """How an application is served under these limits, over TLS if there is a context; `options` are uvicorn's."""
    if tls is not None:
        options["ssl_context_factory"] = lambda *_: tls
    return BoundedTlsConfig(limits, app, http=guarded(limits), ws="none", **options)
