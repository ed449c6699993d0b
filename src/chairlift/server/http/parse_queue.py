"""Limits the number of bytes that connections parse in one iteration of the event loop.

packet --> one slice is parsed --> the rest waits, and its connection stops reading
              ^                                     |
              +-- ParseQueue: one slice in each iteration of the event loop
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.flow_control import FlowControl

SLICE_BYTES: Final = 8 << 10
"""The number of bytes of headers, chunks and trailers that are parsed together. In the worst case, chunks of one byte,
this takes about 3 ms. Bodies with a Content-Length do not count, because their bytes are only copied."""

MAX_PIPELINED: Final = 16
"""The maximum number of parsed requests of one connection that wait for the responses to earlier requests."""


class ParseQueue:
    """Lets the connections of one event loop parse in rotation, one slice in each iteration of the loop."""

    def __init__(self) -> None:
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def has_waiting(self) -> bool:
        """Whether any connection waits to parse its next slice."""
        return bool(self._waiting)

    def add(self, loop: asyncio.AbstractEventLoop, parse_slice: Callable[[], None]) -> None:
        """Schedule a call of the function with which a connection parses a slice, unless it waits already."""
        if not self._waiting:
            loop.call_soon(self._run, loop)
        self._waiting[parse_slice] = None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        parse_slice = next(iter(self._waiting))
        del self._waiting[parse_slice]
        if self._waiting:
            loop.call_soon(self._run, loop)
        parse_slice()


class PausableFlowControl(FlowControl):
    """uvicorn's flow control, which in addition stops reading while bytes wait to be parsed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False
        self._should_read = True

    def hold(self) -> None:
        """Stop reading until `release` is called."""
        self._is_held = True
        if not self._transport.is_closing():
            super().pause_reading()

    def release(self) -> None:
        """Resume reading, unless uvicorn has paused it."""
        self._is_held = False
        if self._should_read and not self._transport.is_closing():
            super().resume_reading()

    def pause_reading(self) -> None:
        """Pause reading, as in uvicorn."""
        self._should_read = False
        super().pause_reading()

    def resume_reading(self) -> None:
        """Resume reading, as in uvicorn, or when `release` is called if the connection is held."""
        self._should_read = True
        if not self._is_held:
            super().resume_reading()
