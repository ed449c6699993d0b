"""uvicorn's HTTP protocol with limits on the bytes and seconds that a connection can use.

connect ---- header_timeout ----> headers complete ---- body_timeout (BodyLimitMiddleware) ----> response
                                                                                                    |
abort <------ write_timeout without progress while max_unsent_bytes wait to be sent <---------------+

A response that precedes the end of its request, such as a 413, ends in a lingering close (RFC 9112, section 9.6): the
writing side is closed, and the rest of the request is read and discarded for a limited time. If the connection were
closed immediately, the reset would make the client's kernel discard a response that the client has not read yet.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from chairlift.server.http.event_loop import BoundedTlsConfig
from chairlift.server.http.message_framing import (
    EMPTY_LINE,
    FRAMING_HEADERS,
    CountedBody,
    FieldLines,
    MessagePart,
    body_part,
)
from chairlift.server.http.parse_queue import MAX_PIPELINED, SLICE_BYTES, ParseQueue, PausableFlowControl
from chairlift.server.http.server_limits import ServerLimits
from chairlift.server.protocol.base import ErrorBody, ErrorInfo

logger = logging.getLogger("chairlift")

MAX_DISCARDED_BODIES: Final = 8
"""A lingering connection is closed after this many times `max_body_bytes` have been discarded."""
LINGER_IDLE_SECONDS: Final = 2.0
"""Seconds without a byte after which a lingering connection is closed; `body_timeout` limits the whole time."""

_ABSOLUTE_TARGET: Final = re.compile(rb"[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)


class _Timer:
    """Calls a function once after some seconds, unless it is stopped before."""

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


class _BodyCallbacks:
    """The callbacks of a parser that reads only the body of a request, after another parser has read the headers."""

    def __init__(self, protocol: LimitedHttpProtocol) -> None:
        self.on_body = protocol.on_body
        self._protocol = protocol

    def on_message_complete(self) -> None:
        self._protocol.parser = _new_parser(self._protocol)
        self._protocol.on_message_complete()


def _new_parser(callbacks: Any) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


class LimitedHttpProtocol(HttpToolsProtocol):
    """One HTTP connection.

    Args:
        parse_queue: The queue of the event loop.
        args, options: Those of uvicorn's protocol.
    """

    flow: PausableFlowControl

    def __init__(self, limits: ServerLimits, parse_queue: ParseQueue, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.limits = limits
        self.parse_queue = parse_queue
        self._head = FieldLines()
        self._body: MessagePart | None = None
        self._unparsed = b""
        self._header_timer = _Timer(self.loop)
        self._body_timer = _Timer(self.loop)
        self._write_timer = _Timer(self.loop)
        self._linger_timer = _Timer(self.loop)
        self._rejection: tuple[int, str] | None = None
        self._is_lingering = False
        self._linger_deadline = 0.0
        self._num_discarded = 0
        self._num_unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PausableFlowControl(transport)
        self._limit_write_buffers(transport)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        is_first = not self._unparsed
        self._unparsed += data
        if is_first and (len(data) <= SLICE_BYTES or not self.parse_queue.has_waiting):
            self.parse_slice()
        else:
            self._parse_later()

    def parse_slice(self) -> None:
        """Parse a slice of the bytes that have arrived, and schedule the rest for later iterations of the loop."""
        data, start, budget = self._unparsed, 0, SLICE_BYTES
        while start < len(data) and budget > 0 and self._can_parse:
            if self._is_lingering or self._rejection is not None:
                self._discard(len(data) - start)
                start = len(data)
            elif isinstance(self._body, CountedBody):
                start = self._receive_part(data, start)
            else:
                num_bytes = self._receive_part(data[start : start + budget], 0)
                start += num_bytes
                budget -= num_bytes
        self._unparsed = b"" if self.transport.is_closing() else data[start:]
        if self._unparsed:
            self._parse_later()
        else:
            self.flow.release()

    def _parse_later(self) -> None:
        self.flow.hold()
        if self._can_parse:
            self.parse_queue.add(self.loop, self.parse_slice)

    @property
    def _can_parse(self) -> bool:
        """Whether more bytes may be parsed: the connection is open, and few enough requests wait for responses."""
        has_room = len(self.pipeline) < MAX_PIPELINED or self._is_lingering
        return has_room and not self.transport.is_closing()

    def _receive_part(self, data: bytes, start: int) -> int:
        """Pass the bytes of one part of a request to the parser, and return the index after them."""
        if self._body is None and self._head.num_field_bytes == 0:
            start = _skip_empty_lines(data, start)
            if start == len(data):
                return start
        part = self._head if self._body is None else self._body
        end = part.find_end(data, start)
        if part.num_field_bytes > self.limits.max_header_bytes:
            problem = f"have more than {self.limits.max_header_bytes} bytes (max_header_bytes)"
            self._reject(431, f"the request line and headers, or the trailers, {problem}: send fewer or shorter ones")
            return len(data)
        if self._body is None and not self._header_timer.is_running:
            self._start_header_timer()
        if end is None or end == start:
            end = len(data)
        self._parse(data[start:end])
        return end

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._ignore_upgrade()
        except httptools.HttpParserError as error:
            logger.warning("invalid HTTP request from %s: %.200s", self._peer(), error)
            self._reject(400, f"the HTTP request is invalid: {error!s:.200}")

    def _peer(self) -> str:
        if self.client is None:
            return "a local socket"
        host, port = self.client
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _ignore_upgrade(self) -> None:
        """Continue in HTTP/1.1 without the requested upgrade (RFC 9110, section 7.8).

        Java's HTTP client requests an upgrade by default. The parser stops after the headers of such a request, so
        another parser reads the body.
        """
        if self._body is None:
            self.parser = _new_parser(self)
            return
        self.parser = _new_parser(_BodyCallbacks(self))
        framing = (name + b": " + value for name, value in self.headers if name in FRAMING_HEADERS)
        self.parser.feed_data(b"\r\n".join((b"POST / HTTP/1.1", *framing)) + EMPTY_LINE)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Trailers are discarded, because some checks of the headers would not see them."""
        if self._body is None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._header_timer.stop()
        if target := _ABSOLUTE_TARGET.match(self.url):
            self._set_host(target[1])
        self._body = body_part(self.headers)
        super().on_headers_complete()

    @property
    def _has_body(self) -> bool:
        return any(name in FRAMING_HEADERS and value.strip() != b"0" for name, value in self.headers)

    def _set_host(self, authority: bytes) -> None:
        """Replace the Host header with the host of an absolute target (RFC 9112, section 3.2.2)."""
        places = [place for place, (name, _) in enumerate(self.headers) if name == b"host"]
        if len(places) == 1:
            self.headers[places[0]] = (b"host", authority)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._has_body:
            return
        super().on_message_complete()
        self._head, self._body = FieldLines(), None
        self._body_timer.stop()

    def _start_header_timer(self) -> None:
        self._header_timer.start(self.limits.header_timeout, self._on_header_timeout)

    def _on_header_timeout(self) -> None:
        """Reject the request whose headers are late. While a response is sent, headers of the next one may wait."""
        if self._is_responding:
            self._start_header_timer()
        elif not self.transport.is_closing():
            seconds = self.limits.header_timeout
            self._reject(408, f"the request line and headers did not arrive within {seconds:g} s (header_timeout)")

    @property
    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_write_timer()
        if self._unparsed:
            self._parse_later()
        if self._is_responding or self.transport.is_closing():
            return
        if self._rejection is not None:
            self._reject(*self._rejection)
        elif self._body is not None:
            self._body_timer.start(self.limits.body_timeout, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, partial(self._run_app, cycle, app))

    async def _run_app(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        is_delimited_by_close = False

        async def send_framed(message: Message) -> None:
            nonlocal is_delimited_by_close
            if message["type"] == "http.response.start":
                is_delimited_by_close = scope["http_version"] < "1.1" and not _has_length(message)
                if is_delimited_by_close:  # HTTP/1.0 has no chunks (RFC 9112, section 6.1).
                    cycle.chunked_encoding = False
            elif is_delimited_by_close:
                cycle.expected_content_length = len(message.get("body", b""))
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            lingers = is_last and not cycle.keep_alive and self._body is not None
            if lingers:
                cycle.keep_alive = True  # uvicorn would close the connection.
            await send(message)
            if lingers and not self.transport.is_closing():
                self._linger()

        await app(scope, receive, send_framed)

    def _reject(self, status: int, message: str) -> None:
        """Send an error after the responses to earlier requests, and close the connection."""
        if self._is_responding and self._body is None:
            self._rejection = status, message
            return
        if self._is_responding and (self.cycle.response_started or self.pipeline):
            self.transport.abort()
            return
        if self._is_responding:  # The application waits for the rest of the body.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = ErrorBody(error=ErrorInfo(message=message, type="invalid_request_error")).model_dump_json().encode()
        headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + headers + body)
        self._start_write_timer()
        self._linger()

    def _linger(self) -> None:
        self._is_lingering = True
        self._header_timer.stop()
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():  # Not over TLS.
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_deadline = self.loop.time() + self.limits.body_timeout
        self._discard(0)

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > MAX_DISCARDED_BODIES * self.limits.max_body_bytes:
            self.transport.abort()
        if not self._is_lingering:
            return
        seconds = min(LINGER_IDLE_SECONDS, self._linger_deadline - self.loop.time())
        self._linger_timer.start(max(0.0, seconds), self.transport.abort)

    def shutdown(self) -> None:
        if self._is_lingering:  # Closing would wait for the client's end of the TLS session.
            self.transport.abort()
        else:
            super().shutdown()

    def _limit_write_buffers(self, transport: asyncio.Transport) -> None:
        """Limit the unsent bytes in the transport and in the kernel, whose buffer would otherwise grow to megabytes."""
        transport.set_write_buffer_limits(high=self.limits.max_unsent_bytes // 2)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.max_unsent_bytes // 4)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer.stop()
        if not self._is_responding:
            self._start_write_timer()

    def _start_write_timer(self) -> None:
        """Abort the connection if no unsent byte is sent for `write_timeout` seconds.

        This includes the end of a response, because closing a connection would wait until its buffer is empty.
        """
        self._num_unsent = self.transport.get_write_buffer_size()
        if self._num_unsent:
            self._write_timer.start(self.limits.write_timeout, self._on_write_timeout)
        else:
            self._write_timer.stop()

    def _on_write_timeout(self) -> None:
        has_grown = self.transport.get_write_buffer_size() >= self._num_unsent
        if has_grown and (self.flow.write_paused or not self._is_responding):
            self.transport.abort()
        else:
            self._start_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._body_timer, self._write_timer, self._linger_timer):
            timer.stop()
        self._unparsed = b""
        super().connection_lost(exc)


def _skip_empty_lines(data: bytes, start: int) -> int:
    """The index after the empty lines that may precede a request (RFC 9112, section 2.2)."""
    if data[start] not in b"\r\n":
        return start
    return len(data) - len(data[start:].lstrip(b"\r\n"))


def _has_length(message: Message) -> bool:
    return any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))


def uvicorn_config(app: Any, limits: ServerLimits, tls: ssl.SSLContext | None = None, **options: Any) -> uvicorn.Config:
    """The configuration of uvicorn for an application with these limits.

    Args:
        tls: The TLS context; None for plain HTTP.
        options: Further options of `uvicorn.Config`.
    """
    if tls is not None:
        options["ssl_context_factory"] = lambda *_: tls
    protocol: Any = partial(LimitedHttpProtocol, limits, ParseQueue())
    return BoundedTlsConfig(limits, app, http=protocol, ws="none", **options)
