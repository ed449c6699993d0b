"""The lines of a batch: OpenAI's batch file format, one request and one answer a line.

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
"""A longer line is read past, and answered with an error."""


class BatchRequestInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the input."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class BatchLineError(msgspec.Struct, frozen=True):
    """Why a line never became a request. `line` counts from 1."""

    code: str
    message: str
    line: int


class BatchResponseData(msgspec.Struct, frozen=True):
    """What the API answered; a refusal, too, is an answer, with its status."""

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
    """As much of an BatchRequestOutput as tells what it answers: `custom_id`, or the line of an error."""

    id: str
    custom_id: str | None
    error: BatchLineError | None

    @property
    def line(self) -> int | None:
        return None if self.error is None else self.error.line


_requests = msgspec.json.Decoder(BatchRequestInput)
_named = msgspec.json.Decoder(_CustomIdField)
_answered = msgspec.json.Decoder(AnsweredRequest)
_encode = msgspec.json.Encoder().encode

DecodeError = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What damaged or hostile JSON ends in."""


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, from 1; one beyond MAX_LINE_BYTES is cut to something longer than that. A byte order
    mark of UTF-8, which some editors write, is no part of the first line."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 2):
        number += 1
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
            pass
        yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def read_custom_id(line: bytes) -> str | None:
    """What a line calls itself, however wrong the rest of it may be."""
    try:
        return _named.decode(line).custom_id
    except DecodeError:
        return None


def parse_request(line: bytes, number: int) -> BatchRequestInput | BatchLineError:
    """The request of a line, or what is wrong with it."""
    if len(line) > MAX_LINE_BYTES + 1:
        return BatchLineError(
            "line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes: shorten its body", number
        )
    try:
        return _requests.decode(line)
    except msgspec.ValidationError as error:
        return BatchLineError("invalid_request", f"{error}; a line holds custom_id, method, url and body", number)
    except DecodeError as error:
        return BatchLineError("invalid_json_line", f"the line is not valid JSON: {error}", number)


def parse_answered(line: bytes) -> AnsweredRequest:
    """Raises one of DecodeError if the line is no answer."""
    return _answered.decode(line)


def answer_line(
    custom_id: str | None, response: BatchResponseData | None = None, error: BatchLineError | None = None
) -> bytes:
    """One line of the output, newline included."""
    return _encode(BatchRequestOutput(f"batch_req_{uuid.uuid4().hex}", custom_id, response, error)) + b"\n"


def is_blank(line: bytes) -> bool:
    return not line.strip()
