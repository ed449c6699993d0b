"""The ends of the parts of requests are found for every division into packets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.http.message_framing import ChunkedBody, FieldLines, MessagePart, body_part

CONTENT = st.text("\r\n0a;", max_size=12).map(str.encode)
"""Contents of bodies that resemble the end of a part."""
FIELDS = st.lists(st.sampled_from([b"X: y", b"A:", b"Host: x:0"]), max_size=3)


def lines(first: bytes, fields: list[bytes]) -> bytes:
    return b"".join(line + b"\r\n" for line in (first, *fields)) + b"\r\n"


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Headers as the parser reports them, and the bytes of the head and of the body."""
    head = lines(b"POST / HTTP/1.1", draw(FIELDS))
    if draw(st.booleans()):
        body = draw(CONTENT)
        return [(b"content-length", b"%d" % len(body))], [head, body]
    chunks = [chunk for chunk in draw(st.lists(CONTENT, max_size=3)) if chunk]
    extension = draw(st.sampled_from([b"", b";a=b", b" ;0"]))
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    return [(b"transfer-encoding", b"chunked")], [head, body + lines(b"0" + extension, draw(FIELDS))]


def sizes_found(parts: list[MessagePart], packets: list[bytes]) -> list[int]:
    """The number of bytes that each part reads from these packets."""
    sizes = [0]
    for packet in packets:
        start = 0
        while start < len(packet):
            end = parts[len(sizes) - 1].find_end(packet, start)
            sizes[-1] += (len(packet) if end is None else end) - start
            start = len(packet) if end is None else end
            if end is not None:
                sizes.append(0)
    return sizes[:-1]


@given(sent=st.lists(requests(), min_size=1, max_size=3), cuts=st.sets(st.integers(0, 300), max_size=8))
@settings(max_examples=300, deadline=None)
def test_parts_end_at_their_last_byte_in_any_packets(
    sent: list[tuple[list[tuple[bytes, bytes]], list[bytes]]], cuts: set[int]
) -> None:
    present = [(headers, [part for part in parts if part]) for headers, parts in sent]
    whole = b"".join(part for _, parts in present for part in parts)
    places = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    packets = [whole[start:end] for start, end in itertools.pairwise(places)]
    readers: list[MessagePart] = []
    for headers, parts in present:
        readers += [FieldLines(), body_part(headers)][: len(parts)]
    assert sizes_found(readers, packets) == [len(part) for _, parts in present for part in parts]


def test_bytes_of_fields_are_counted_with_the_empty_line() -> None:
    head = FieldLines()
    assert head.find_end(b"GET / HTTP/1.1\r\nA: b\r", 0) is None
    assert head.num_field_bytes == 21
    assert head.find_end(b"..\n\r\nrest", 2) == 5
    assert head.num_field_bytes == 24


def test_trailers_and_extensions_of_chunks_are_counted_and_the_content_is_not() -> None:
    body = ChunkedBody()
    assert body.find_end(b"5;" + b"e" * 40, 0) is None
    assert body.num_field_bytes == 42
    assert body.find_end(b"\r\nhello\r\n0\r\nX: y", 0) is None
    assert body.num_field_bytes == 4
    assert body.find_end(b"\r\n\r\nGET", 0) == 4
    assert body.num_field_bytes == 8


@pytest.mark.parametrize("size", [b"-6", b"+5", b"0x5", b"1_0", b"", b"-0", b"g", b"1" * 17])
def test_a_chunk_size_consists_of_hexadecimal_digits_only(size: bytes) -> None:
    body = ChunkedBody()
    assert body.find_end(size + b"\r\n" + b"x" * 40, 0) is None, "the parser gets all of it, and rejects it"
