"""The boundaries between the parts of HTTP/1.1 requests in a stream of bytes (RFC 9112, sections 2.1, 6 and 7.1).

httptools reports that a part is complete, but not at which byte. To limit the size of headers and trailers exactly, the
bytes of one part at a time are passed to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Protocol

EMPTY_LINE: Final = b"\r\n\r\n"
FRAMING_HEADERS: Final = (b"content-length", b"transfer-encoding")
_OVERLAP: Final = len(EMPTY_LINE) - 1

_CHUNK_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,16}")


class MessagePart(Protocol):
    """A part of a request that may arrive in several packets.

    Attributes:
        num_field_bytes: The number of its bytes so far that belong to a request line, headers, trailers or chunk
            extensions.
    """

    num_field_bytes: int

    def find_end(self, data: bytes, start: int) -> int | None:
        """Read a packet, and return the index after the last byte of the part; None if the part continues.

        Args:
            data: The next packet. Each packet must be passed once, in order.
            start: The index of the first byte in the packet that belongs to this part.
        """


class FieldLines:
    """A request line with its headers, or trailers: all lines up to and including the first empty line.

    Args:
        before: The end of the line before the first one.
    """

    def __init__(self, before: bytes = b"") -> None:
        self.num_field_bytes = 0
        self._tail = before

    def find_end(self, data: bytes, start: int) -> int | None:
        seam = (self._tail + data[start : start + _OVERLAP]).find(EMPTY_LINE)
        at = data.find(EMPTY_LINE, start) if seam < 0 else start - len(self._tail) + seam
        end = None if at < 0 and seam < 0 else at + len(EMPTY_LINE)
        self.num_field_bytes += (len(data) if end is None else end) - start
        self._tail = (self._tail + data[max(start, len(data) - _OVERLAP) :])[-_OVERLAP:]
        return end


class CountedBody:
    """A body with a Content-Length of `num_bytes`."""

    num_field_bytes = 0

    def __init__(self, num_bytes: int) -> None:
        self._num_left = num_bytes

    def find_end(self, data: bytes, start: int) -> int | None:
        end = start + self._num_left
        self._num_left = max(0, end - len(data))
        return end if end <= len(data) else None


class ChunkedBody:
    """A body in chunked transfer coding, including its trailers.

    The parser validates the chunks. All bytes after an invalid chunk size belong to this part.
    """

    def __init__(self) -> None:
        self.num_field_bytes = 0
        self._line = b""
        self._num_left = 0
        self._trailers: FieldLines | None = None

    def find_end(self, data: bytes, start: int) -> int | None:
        while self._trailers is None:
            start += self._num_left
            self._num_left = max(0, start - len(data))
            newline = data.find(b"\n", start)
            if newline < 0:
                self._line += data[start:]
                self.num_field_bytes = len(self._line)
                return None
            size = _chunk_size(self._line + data[start:newline])
            if size is None:
                return None
            start, self._line = newline + 1, b""
            if size == 0:
                self._trailers = FieldLines(before=b"\r\n")
            else:
                self._num_left = size + len(b"\r\n")
        end = self._trailers.find_end(data, start)
        self.num_field_bytes = self._trailers.num_field_bytes
        return end


def _chunk_size(line: bytes) -> int | None:
    """The chunk size of a line; None if it is invalid. `int` alone would accept signs and underscores."""
    digits = line.partition(b";")[0].strip(b" \t\r")
    return int(digits, 16) if _CHUNK_SIZE.fullmatch(digits) else None


def body_part(headers: Iterable[tuple[bytes, bytes]]) -> MessagePart:
    """The body of a request with these headers, which the parser has validated."""
    fields = dict(headers)
    if b"transfer-encoding" in fields:
        return ChunkedBody()
    return CountedBody(int(fields.get(b"content-length", b"0")))
