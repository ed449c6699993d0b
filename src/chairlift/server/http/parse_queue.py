"""Bounds the bytes that connections parse in one turn of the event loop.

packet --> one slice is parsed --> the rest waits, and its connection reads no more
              ^                                     |
              +-- ParseQueue: one slice per turn -+
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from uvicorn.protocols.http.flow_control import FlowControl

SLICE_BYTES: Final = 8 << 10
"""Bytes of headers, chunks and trailers that are parsed at once. In the worst case, which is chunks of one byte, this
takes about 3 ms. Bodies with a Content-Length are not counted: their bytes are only copied."""

MAX_PIPELINED: Final = 16
"""Parsed requests of one connection that wait for the responses to the requests before them."""


class SlicedConnection(Protocol):
    """A connection that parses in slices."""

    loop: asyncio.AbstractEventLoop

    def parse_slice(self) -> None:
        """Parse one slice of the bytes that have arrived."""


class ParseQueue:
    """Lets the connections of one event loop parse their next slices, in rotation, one slice per turn of the loop."""

    def __init__(self) -> None:
        self._waiting: dict[SlicedConnection, None] = {}

    @property
    def has_waiting(self) -> bool:
        """Whether a connection waits for its turn."""
        return bool(self._waiting)

    def add(self, connection: SlicedConnection) -> None:
        """Call `parse_slice` of a connection in a later turn of its event loop, once even if it is added twice."""
        if not self._waiting:
            connection.loop.call_soon(self._run)
        self._waiting[connection] = None

    def _run(self) -> None:
        connection = next(iter(self._waiting))
        del self._waiting[connection]
        if self._waiting:
            connection.loop.call_soon(self._run)
        connection.parse_slice()


class PausableFlowControl(FlowControl):
    """uvicorn's flow control, which in addition does not read while bytes wait to be parsed (`hold`)."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False
        self._should_read = True

    def hold(self) -> None:
        """Read nothing until `release` is called."""
        self._is_held = True
        if not self._transport.is_closing():
            super().pause_reading()

    def release(self) -> None:
        """Read again, unless reading is paused for another reason."""
        self._is_held = False
        if self._should_read and not self._transport.is_closing():
            super().resume_reading()

    def pause_reading(self) -> None:
        """Pause reading, as in uvicorn."""
        self._should_read = False
        super().pause_reading()

    def resume_reading(self) -> None:
        """Resume reading, as in uvicorn; while the connection is held, `release` resumes it."""
        self._should_read = True
        if not self._is_held:
            super().resume_reading()
