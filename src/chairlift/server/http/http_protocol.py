"""uvicorn's HTTP protocol with limits for clients that send or read badly, its configuration, and its socket."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chairlift.errors import ConfigError

MAX_HEADER_BYTES: Final = 64 << 10  # of a request line and headers, or of trailers; a connection with more is closed
MAX_PIPELINED: Final = 128  # requests of a connection that wait for earlier responses
WRITE_SECONDS: Final = 30.0  # without progress, until the connection of a client that does not read is closed

_H2C_UPGRADE: Final = b"\r\nUpgrade: h2c\r\n"
_IGNORED_UPGRADE: Final = b"\r\nIgnored: h2c\r\n"
"""Of the same length, so that a body with these bytes, which is not valid JSON, still ends at the same byte."""


logger = logging.getLogger("chairlift")


class HttpProtocol(HttpToolsProtocol):
    """One HTTP connection, as in uvicorn on httptools, which would keep headers, requests and responses of any size and
    number in memory."""

    _num_header_bytes = 0
    _write_check: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Parse a packet, without a request for HTTP/2, which Java's client sends by default.

        A server may ignore such a request (RFC 9110, section 7.8), but httptools would discard the body after it.
        """
        self._num_header_bytes += len(data)
        super().data_received(data.replace(_H2C_UPGRADE, _IGNORED_UPGRADE))
        if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers have more than {MAX_HEADER_BYTES} bytes: send fewer or shorter ones.")

    def on_headers_complete(self) -> None:
        """Start the request. An error is answered with status 400, and closes the connection."""
        self._num_header_bytes = 0
        if self.parser.should_upgrade():
            raise ValueError("httptools would read the body of this request as the next request")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests wait for earlier responses")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_header_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Reject what a connection has sent. If a response has begun, the connection is only closed."""
        is_responding = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if is_responding or self.pipeline:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        """Stop to write because the client does not read, and close the connection if this continues."""
        super().pause_writing()
        self._check_progress(None)

    def resume_writing(self) -> None:
        self._stop_write_check()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_write_check()
        super().connection_lost(exc)

    def _check_progress(self, earlier: int | None) -> None:
        """Abort the connection if the client has read nothing since there were `earlier` unsent bytes."""
        self._stop_write_check()
        unsent = self.transport.get_write_buffer_size()
        if earlier is not None and unsent >= earlier:
            logger.warning("a connection is closed because its client has read nothing for %g s", WRITE_SECONDS)
            self.transport.abort()
        else:
            self._write_check = self.loop.call_later(WRITE_SECONDS, self._check_progress, unsent)

    def _stop_write_check(self) -> None:
        if self._write_check is not None:
            self._write_check.cancel()
            self._write_check = None


def uvicorn_config(app: Any, **options: Any) -> uvicorn.Config:
    """The configuration of uvicorn for an application, with further options. Raises ConfigError if OpenSSL rejects the
    files of `ssl_certfile` and `ssl_keyfile`."""
    config = uvicorn.Config(app, http=HttpProtocol, ws="none", **options)
    try:
        config.load()
    except ssl.SSLError as error:
        raise ConfigError(
            f"ssl_certfile={config.ssl_certfile} and ssl_keyfile={config.ssl_keyfile} cannot be used "
            f"({error.reason or error}): give complete PEM files of a certificate and its key"
        ) from None
    return config


MAX_PORT: Final = 65535


def listen(host: str, port: int) -> socket.socket:
    """Listen on a port, or on a free one if it is 0. Raises ConfigError if it is not possible."""
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"port must be from 1 to {MAX_PORT}, or 0 for a free port, got {port}: choose another --port")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host:.100}:{port}: {error}; choose another --host or --port") from None
    return listener


def url_of(host: str, listener: socket.socket, scheme: str = "http") -> str:
    """The URL of a server without a slash at its end."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
