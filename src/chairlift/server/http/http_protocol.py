"""uvicorn's HTTP protocol with a limit on the size of headers, and the configuration of uvicorn."""

from __future__ import annotations

import ssl
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES: Final = 64 << 10
"""Bytes of a request line and headers, or of trailers, after which a connection is closed unless they are complete."""

KEEP_ALIVE_SECONDS: Final = 60
"""Seconds after which uvicorn closes a connection between two requests."""

_H2C_UPGRADE: Final = b"\r\nUpgrade: h2c\r\n"
_IGNORED_UPGRADE: Final = b"\r\nIgnored: h2c\r\n"
"""Of the same length, so that a body with these bytes, which is not valid JSON, still ends at the same byte."""


class HttpProtocol(HttpToolsProtocol):
    """One HTTP connection, as in uvicorn on httptools, which would keep headers of any size in memory."""

    _num_header_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse a packet, without a request for HTTP/2, which Java's client sends by default.

        A server may ignore such a request (RFC 9110, section 7.8), but httptools would discard the body after it.
        """
        self._num_header_bytes += len(data)
        super().data_received(data.replace(_H2C_UPGRADE, _IGNORED_UPGRADE))
        if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers have more than {MAX_HEADER_BYTES} bytes: send fewer or shorter ones.")

    def on_headers_complete(self) -> None:
        self._num_header_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_header_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Reject what a connection has sent. If a response has begun, the connection is only closed."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
        else:
            super().send_400_response(msg)


def uvicorn_config(app: Any, tls: ssl.SSLContext | None = None, **options: Any) -> uvicorn.Config:
    """The configuration of uvicorn for an application.

    Args:
        tls: the TLS context; None for plain HTTP.
        options: further options of `uvicorn.Config`.
    """
    if tls is not None:
        options["ssl_context_factory"] = lambda *_: tls
    return uvicorn.Config(app, http=HttpProtocol, ws="none", timeout_keep_alive=KEEP_ALIVE_SECONDS, **options)
