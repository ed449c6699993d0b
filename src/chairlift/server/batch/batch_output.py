"""The output file of a batch: results are appended line by line, so that an interrupted batch can be resumed.

A line is valid once its line end is in the file. If a crash left an incomplete last line, it is removed when the file
is opened again, and its request is answered again. Lines that are appended together are written with one fsync.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from chairlift.errors import ConfigError
from chairlift.server.batch.batch_index import BatchIndex
from chairlift.server.batch.batch_lines import DecodeError, is_blank, parse_answered

RESULT_START: Final = b'{"id":"batch_req_'
INCOMPLETE_RESULT: Final = re.compile(rb'\{\s*"id"\s*:\s*"batch_req_')
START_BYTES: Final = 64
CHUNK_BYTES: Final = 1 << 20


class BatchOutput:
    """The output file, locked against other writers.

    Args:
        index: the index of the input; lines with a result in the output are marked as answered.

    Attributes:
        num_answered: the number of results that the file already contained.
        num_removed_bytes: the size of the incomplete last line that was removed.

    Raises:
        ConfigError: the file cannot be written, another process writes it, or it contains other data.
    """

    def __init__(self, path: Path, index: BatchIndex) -> None:
        self.path = path
        self.num_answered = 0
        try:
            self._check_target(index)
            self._file = path.open("a+b", buffering=0)
            self._lock()
            self._end = self._read_results(index)
            self.num_removed_bytes = os.fstat(self._file.fileno()).st_size - self._end
            self._file.truncate(self._end)
            os.fsync(self._file.fileno())
            _sync_folder(path.parent)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None

    def _check_target(self, index: BatchIndex) -> None:
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"{self.path} is not a regular file: select another output with -o")
        if self.path.exists() and self.path.samefile(index.path):
            raise ConfigError(f"{self.path} is the input file: select another output with -o")

    def append(self, lines: Sequence[bytes]) -> None:
        """Append complete lines, and return when they are on disk.

        Raises:
            ConfigError: writing failed. The file contains complete lines only, so the batch can be resumed.
        """
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

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path}: another process is writing this file: wait until it has finished"
            ) from None

    def _read_results(self, index: BatchIndex) -> int:
        """Mark the answered lines in the index; return the position after the last complete line."""
        number = 0
        with self.path.open("rb") as file:
            while True:
                number += 1
                end, start = file.tell(), file.readline(START_BYTES)
                if not start.strip(b"\0") and _has_only_zeros(file):
                    return end
                if not _may_be_result(start):
                    raise self._unknown_result_error(number, "not a result of a batch")
                line = start if start.endswith(b"\n") else start + file.readline()
                if not line.endswith(b"\n"):
                    return end
                if not is_blank(line):
                    self._mark(index, line, number)
                    self.num_answered += 1

    def _mark(self, index: BatchIndex, line: bytes, number: int) -> None:
        try:
            answered = parse_answered(line)
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


def _may_be_result(start: bytes) -> bool:
    """Whether a line starts like a result. The lines of another file may be too long to be read into memory."""
    start = start.lstrip(b" \t\r")
    return start == b"\n" or bool(INCOMPLETE_RESULT.match(start)) or (start != b"" and RESULT_START.startswith(start))


def _has_only_zeros(file: BinaryIO) -> bool:
    """Whether the rest of a file consists of zeros, which a file system leaves after a power failure."""
    return not any(chunk.strip(b"\0") for chunk in iter(partial(file.read, CHUNK_BYTES), b""))


def _sync_folder(folder: Path) -> None:
    """Write the directory entry of a new file to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
