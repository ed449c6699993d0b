"""The lines of batch files in OpenAI's format: one request in each line of the input, one result in each of the output.

{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
{"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}},
 "error": null}
"""

from __future__ import annotations

import codecs
import uuid
from collections.abc import Iterator
from typing import BinaryIO, Final, Literal

import msgspec

MAX_LINE_BYTES: Final = 32 << 20
"""A longer line is not read into memory; its result is an error."""


class BatchRequestInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the input."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class BatchLineError(msgspec.Struct, frozen=True):
    """The reason why a line is not a valid request. `line` counts from 1."""

    code: str
    message: str
    line: int


class BatchResponseData(msgspec.Struct, frozen=True):
    """The response of the API to a request, which may be an error response."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchRequestOutput(msgspec.Struct, frozen=True):
    """One line of the output: either a response or an error."""

    id: str
    custom_id: str | None
    response: BatchResponseData | None
    error: BatchLineError | None


class _CustomIdField(msgspec.Struct, frozen=True):
    custom_id: str


class AnsweredRequest(msgspec.Struct, frozen=True):
    """The fields of a `BatchRequestOutput` that identify its request: `custom_id`, or the line of an error."""

    id: str
    custom_id: str | None
    error: BatchLineError | None


_request_decoder = msgspec.json.Decoder(BatchRequestInput)
_custom_id_decoder = msgspec.json.Decoder(_CustomIdField)
_answered_decoder = msgspec.json.Decoder(AnsweredRequest)
_encode = msgspec.json.Encoder().encode

DecodeError = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that decoding damaged or hostile JSON raises."""


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Read the lines of a file with their numbers, counted from 1.

    A line of more than MAX_LINE_BYTES is cut to a length above this limit. A UTF-8 byte order mark at the start of the
    file is removed.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 2):
        number += 1
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
            pass
        yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def read_custom_id(line: bytes) -> str | None:
    """The `custom_id` of a line, even if the rest of the line is not a valid request."""
    try:
        return _custom_id_decoder.decode(line).custom_id
    except DecodeError:
        return None


def parse_request(line: bytes, number: int) -> BatchRequestInput | BatchLineError:
    """The request of a line, or the error for a line that is not a valid request."""
    if len(line) > MAX_LINE_BYTES + 1:
        message = f"the line is longer than {MAX_LINE_BYTES} bytes: shorten its body"
        return BatchLineError("line_too_long", message, number)
    try:
        return _request_decoder.decode(line)
    except msgspec.ValidationError as error:
        message = f"{error}; a line must have custom_id, method, url and body"
        return BatchLineError("invalid_request", message, number)
    except DecodeError as error:
        return BatchLineError("invalid_json_line", f"the line is not valid JSON: {error}", number)


def parse_answered(line: bytes) -> AnsweredRequest:
    """The request that a line of the output answers; raises one of DecodeError if the line is not a result."""
    return _answered_decoder.decode(line)


def answer_line(
    custom_id: str | None, response: BatchResponseData | None = None, error: BatchLineError | None = None
) -> bytes:
    """One line of the output, with its line end."""
    return _encode(BatchRequestOutput(f"batch_req_{uuid.uuid4().hex}", custom_id, response, error)) + b"\n"


def is_blank(line: bytes) -> bool:
    return not line.strip()
