"""The bytes that are parsed in one iteration of the event loop are limited, and no byte is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from chairlift.server.http.parse_queue import MAX_PIPELINED, SLICE_BYTES
from chairlift.server.http.protocol import LimitedHttpProtocol, uvicorn_config
from chairlift.server.http.server_limits import ServerLimits

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED_POST = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ONE_BYTE = b"1\r\nx\r\n"
ITERATIONS_PER_REQUEST = 10
ITERATIONS_PER_MESSAGE = 3
"""Iterations after which an application that waits for more of a body has received it."""


class RecordingTransport(asyncio.Transport):
    """A transport of a client that reads everything."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_reading = True
        self._is_closing = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


class Server:
    """An application that reads a whole body and returns its size, and connections to it."""

    def __init__(self) -> None:
        self.may_respond = asyncio.Event()
        self.may_respond.set()
        self.received: list[int] = []
        self._config = uvicorn_config(self._app, ServerLimits(), interface="asgi3", log_level="warning")
        self._config.load()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_last = False
        while not is_last:
            message = await receive()
            self.received.append(len(message.get("body", b"")))
            is_last = not message.get("more_body", False)
        await self.may_respond.wait()
        content = b"%d bytes" % sum(self.received)
        headers = [(b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def connect(self) -> tuple[LimitedHttpProtocol, RecordingTransport]:
        protocol = self._config.http_protocol_class(self._config, ServerState(), {})  # type: ignore[call-arg]
        assert isinstance(protocol, LimitedHttpProtocol)
        transport = RecordingTransport()
        protocol.connection_made(transport)
        return protocol, transport


def test_a_body_of_chunks_of_one_byte_is_parsed_in_many_iterations() -> None:
    async def test() -> None:
        server = Server()
        protocol, transport = server.connect()
        num_chunks = 40_000
        protocol.data_received(CHUNKED_POST + ONE_BYTE * num_chunks + b"0\r\n\r\n" + GET)
        assert not transport.is_reading, "the client must wait until its bytes are parsed"
        for _ in range(num_chunks):
            await asyncio.sleep(0)
            if transport.written.count(b"HTTP/1.1 200") == 2:
                break
        assert max(server.received) <= ITERATIONS_PER_MESSAGE * SLICE_BYTES / len(ONE_BYTE)
        assert b"40000 bytes" in transport.written
        assert transport.is_reading
        protocol.connection_lost(None)

    asyncio.run(test())


def test_pipelined_requests_are_parsed_as_their_responses_are_sent() -> None:
    async def test() -> None:
        server = Server()
        server.may_respond.clear()
        protocol, transport = server.connect()
        num_requests = 5_000
        protocol.data_received(GET * num_requests)
        for _ in range(ITERATIONS_PER_REQUEST):
            await asyncio.sleep(0)
        assert len(protocol.pipeline) == MAX_PIPELINED
        assert not transport.is_reading
        server.may_respond.set()
        num_answered = 0
        for _ in range(ITERATIONS_PER_REQUEST * num_requests):
            await asyncio.sleep(0)
            assert len(protocol.pipeline) <= MAX_PIPELINED
            num_answered += transport.written.count(b"HTTP/1.1 200")
            transport.written = b""
            if num_answered == num_requests:
                break
        assert num_answered == num_requests
        assert transport.is_reading
        protocol.connection_lost(None)

    asyncio.run(test())


def test_connections_are_parsed_in_rotation() -> None:
    async def test() -> None:
        server = Server()
        connections = [server.connect() for _ in range(4)]
        parsed: list[int] = []
        for number, (protocol, _) in enumerate(connections):
            parse_slice = protocol.parse_slice

            def record(number: int = number, parse_slice: Callable[[], None] = parse_slice) -> None:
                parsed.append(number)
                parse_slice()

            protocol.parse_slice = record  # type: ignore[method-assign]
            protocol.data_received(CHUNKED_POST + ONE_BYTE * SLICE_BYTES)
        assert parsed == [0], "only the first one parses immediately"
        for turn in range(1, 9):
            await asyncio.sleep(0)
            assert len(parsed) <= turn + 1
        assert parsed[:9] == [0, 0, 1, 2, 3, 0, 1, 2, 3]
        late, transport = server.connect()
        late.data_received(GET)
        for _ in range(ITERATIONS_PER_REQUEST):
            await asyncio.sleep(0)
        assert b"HTTP/1.1 200" in transport.written, "a small request does not wait for the others"
        for protocol, _ in (*connections, (late, transport)):
            protocol.connection_lost(None)

    asyncio.run(test())


@pytest.mark.parametrize("ending", ["close", "lost"])
def test_a_closed_connection_is_not_parsed_further(ending: str) -> None:
    async def test() -> None:
        server = Server()
        protocol, transport = server.connect()
        protocol.data_received(CHUNKED_POST + ONE_BYTE * SLICE_BYTES)
        transport.close()
        if ending == "lost":
            protocol.connection_lost(None)
        for _ in range(ITERATIONS_PER_REQUEST):
            await asyncio.sleep(0)
        assert sum(server.received) < 2 * SLICE_BYTES / len(ONE_BYTE)
        assert not protocol.parse_queue.has_waiting

    asyncio.run(test())
