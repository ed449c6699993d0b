"""Batch files in OpenAI's format: each line of the input is a request, and each line of the output is a result.

{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
{"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}},
 "error": null}

Results are appended line by line, so that an interrupted batch can be resumed. A line is valid once its line end is in
the file. If a crash left an incomplete last line, it is removed when the file is opened again, and its request is
answered again. Lines that are appended together are written with one fsync.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, Literal

import msgspec

from chairlift.errors import ConfigError
from chairlift.system.input_files import open_regular_file

MAX_LINE_BYTES: Final = 9 << 20
"""A longer line is not read into memory; its result is an error. The largest body that a server accepts by default
(`max_body_bytes`) fits into a line."""

MAX_LINES: Final = 1 << 20
"""The maximum number of lines of a batch file."""

RESULT_START: Final = b'{"id":"batch_req_'
START_BYTES: Final = 64


class BatchRequestInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


_request_decoder = msgspec.json.Decoder(BatchRequestInput)
_custom_id_decoder = msgspec.json.Decoder(_CustomIdField)
_output_decoder = msgspec.json.Decoder(BatchRequestOutput)
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


def answer_line(
    custom_id: str | None, response: BatchResponseData | None = None, error: BatchLineError | None = None
) -> bytes:
    """One line of the output, with its line end."""
    return _encode(BatchRequestOutput(f"batch_req_{uuid.uuid4().hex}", custom_id, response, error)) + b"\n"


class BatchIndex:
    """The lines of a batch file without a result. The file stays open, because it is read twice. Raises ConfigError if
    it cannot be read, has more than MAX_LINES lines, or two lines have the same `custom_id`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unanswered: dict[str | int, int] = {}
        """The numbers of the lines by `custom_id`, or by number for those without one, which are invalid requests."""
        try:
            self._file = os.fdopen(open_regular_file(path), "rb")
            self._read()
        except OSError as error:
            advice = ", but a batch is read twice: copy it to a file" if error.errno == errno.EINVAL else ""
            raise ConfigError(f"{path} cannot be read: {error.strerror}{advice}") from None

    @property
    def num_unanswered(self) -> int:
        """The number of lines without a result."""
        return len(self._unanswered)

    def mark_answered(self, custom_id: str | None, number: int | None = None) -> bool:
        """Mark the line of a `custom_id` as answered; return False if there is no such line without a result.

        Args:
            number: the number of the line, which a line without a `custom_id` has instead.
        """
        key = number or 0 if custom_id is None else custom_id
        is_known = key in self._unanswered and number in (None, self._unanswered[key])
        if is_known:
            del self._unanswered[key]
        return is_known

    def unanswered(self) -> Iterator[tuple[int, bytes]]:
        """Read the lines without a result from the file, with their numbers. Those that were appended since the index
        was built belong to the next run."""
        numbers = set(self._unanswered.values())
        with self._file:
            self._file.seek(0)
            yield from ((number, line) for number, line in read_lines(self._file) if number in numbers)

    def _read(self) -> None:
        for number, line in read_lines(self._file):
            if number > MAX_LINES:
                raise ConfigError(f"{self.path} has more than {MAX_LINES:,} lines: split it into several batches")
            custom_id = read_custom_id(line)
            if custom_id is None and not line.strip():
                continue
            earlier = self._unanswered.setdefault(number if custom_id is None else custom_id, number)
            if earlier != number:
                raise ConfigError(
                    f"{self.path}, line {number}: custom_id {custom_id!r:.80} is that of line {earlier}. Results are "
                    "matched to requests by custom_id: give each line a different custom_id"
                )


class BatchOutput:
    """The output file, locked against other writers. Raises ConfigError if it cannot be written, another process writes
    it, or it contains other data.

    Args:
        index: the index of the input; lines with a result in the output are marked as answered.

    Attributes:
        num_answered: the number of results that the file already contained.
        num_removed_bytes: the size of the incomplete last line that was removed.
    """

    def __init__(self, path: Path, index: BatchIndex) -> None:
        self.path = path
        self.num_answered = 0
        try:
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} is not a regular file: select another output with -o")
            if path.exists() and path.samefile(index.path):
                raise ConfigError(f"{path} is the input file: select another output with -o")
            self._file = path.open("a+b", buffering=0)
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = self._read_results(index)
            self.num_removed_bytes = os.fstat(self._file.fileno()).st_size - self._end
            self._file.truncate(self._end)
            os.fsync(self._file.fileno())
        except BlockingIOError:
            raise ConfigError(f"{path}: another process is writing this file: wait until it has finished") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None

    def append(self, lines: Sequence[bytes]) -> None:
        """Append complete lines, and return when they are on disk. Raises ConfigError if that fails. Even then the file
        contains complete lines only, so the batch can be resumed."""
        data = memoryview(b"".join(lines))
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:]) or 0
            os.fsync(self._file.fileno())
            if not os.fstat(self._file.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "it was removed while the batch ran")
            self._end += written
        except OSError as error:
            with suppress(OSError):  # An incomplete line is also removed when the file is opened again.
                self._file.truncate(self._end)
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror or error}. All results so far are complete: make "
                "room, and run the same command again to resume the batch"
            ) from None

    def close(self) -> None:
        self._file.close()

    def _read_results(self, index: BatchIndex) -> int:
        """Mark the answered lines in the index; return the position after the last complete line."""
        number = 0
        with self.path.open("rb") as file:
            while True:
                number += 1
                end, start = file.tell(), file.readline(START_BYTES)
                if number > 1 and not start.strip(b"\0"):  # A file system leaves zeros after a power failure.
                    return end
                # The lines of another file may be too long to be read into memory.
                if not (start == b"\n" or start.startswith(RESULT_START) or RESULT_START.startswith(start)):
                    raise self._unknown_result_error(number, "not a result of a batch")
                line = start if start.endswith(b"\n") else start + file.readline()
                if not line.endswith(b"\n"):
                    return end
                if line.strip():
                    self._mark(index, line, number)
                    self.num_answered += 1

    def _mark(self, index: BatchIndex, line: bytes, number: int) -> None:
        try:
            answered = _output_decoder.decode(line)
        except DecodeError as error:
            raise self._unknown_result_error(number, f"not a result of a batch ({error})") from None
        line_number = None if answered.error is None else answered.error.line
        if not index.mark_answered(answered.custom_id, line_number):
            request = "no request" if answered.custom_id is None else f"custom_id {answered.custom_id!r:.80}"
            if line_number is not None:
                request = f"line {line_number}"
            problem = f"result of {request}, which is not in {index.path}, was changed there, or has an earlier result"
            raise self._unknown_result_error(number, problem)

    def _unknown_result_error(self, number: int, problem: str) -> ConfigError:
        return ConfigError(
            f"{self.path}, line {number}: {problem}. A batch can only be resumed with its own output: select another "
            "output with -o, remove this line to answer its request again, or remove the file to start again"
        )
