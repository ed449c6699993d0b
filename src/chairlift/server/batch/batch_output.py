"""The answers of a batch: a file that only grows, line by line, and tells after a crash what is done.

A line counts once its newline is in the file. What a crash tore off in the middle is cut when the file is opened again,
and its request is answered anew. Lines that are handed over together reach the disk together, by one fsync.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from chairlift.errors import ConfigError
from chairlift.server.batch.batch_index import BatchIndex
from chairlift.server.batch.batch_lines import DecodeError, is_blank, parse_answered

ANSWER_START: Final = b'{"id":"batch_req_'
TORN_ANSWER: Final = re.compile(rb'\{\s*"id"\s*:\s*"batch_req_')
LONGEST_START: Final = 64
CHUNK_BYTES: Final = 1 << 20


class BatchOutput:
    """The output file, locked against a second writer.

    Args:
        index: the lines that it answers already are marked in it.

    Attributes:
        num_answered: lines that were there before.
        num_cut: bytes of a torn line that were cut.

    Raises:
        ConfigError: it cannot be written, another process writes it, or it does not answer this batch.
    """

    def __init__(self, path: Path, index: BatchIndex) -> None:
        self.path = path
        self.num_answered = 0
        try:
            self._check_target(index)
            self._file = path.open("a+b", buffering=0)
            self._lock()
            self._end = self._take_up(index)
            self.num_cut = os.fstat(self._file.fileno()).st_size - self._end
            if self.num_cut:
                self._check_torn_line()
                self._file.truncate(self._end)
            os.fsync(self._file.fileno())
            _sync_folder(path.parent)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None

    def _check_target(self, index: BatchIndex) -> None:
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"{self.path} is no file that answers can be read back from: give -o another name")
        if self.path.exists() and self.path.samefile(index.path):
            raise ConfigError(f"{self.path} is the input itself: give -o another name")

    def append(self, lines: Sequence[bytes]) -> None:
        """Write whole lines; they are on the disk when it returns.

        Raises:
            ConfigError: the disk is full or broken; the file holds whole lines only, and the batch can be resumed.
        """
        data = memoryview(b"".join(lines))
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:]) or 0
            self._end += written
            os.fsync(self._file.fileno())
        except OSError as error:
            self._cut_back()
            raise ConfigError(
                f"{self.path}: cannot be written any more: {error.strerror or error}. What was written is whole: make "
                "room, and run the same command again to go on"
            ) from None

    def close(self) -> None:
        self._file.close()

    def _cut_back(self) -> None:
        try:
            self._file.truncate(self._end)
        except OSError:
            return  # it is cut when the file is opened again

    def _lock(self) -> None:
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.path}: another process is writing it: wait for its end") from None

    def _take_up(self, index: BatchIndex) -> int:
        """Mark what is answered; returns where the last whole line ends."""
        end = 0
        with self.path.open("rb") as file:
            if not _may_be_answers(file):
                raise self._foreign(1, "is no answer of a batch")
            for number, line in enumerate(_whole_lines(file), start=1):
                end += len(line)
                if not is_blank(line):
                    self._mark(index, line, number)
                    self.num_answered += 1
        return end

    def _check_torn_line(self) -> None:
        """Only what a batch has written is cut: the beginning of an answer, or zeros that a file system left."""
        with self.path.open("rb") as file:
            file.seek(self._end)
            start = file.read(LONGEST_START)
            is_answer = TORN_ANSWER.match(start) or ANSWER_START.startswith(start)
            while not is_answer and start and not start.strip(b"\0"):
                start = file.read(CHUNK_BYTES)
        if not is_answer and start:
            raise ConfigError(
                f"{self.path} ends in {self.num_cut:,} bytes without a line end that are no part of an answer, and "
                "would be cut: give -o another name, or remove them"
            )

    def _mark(self, index: BatchIndex, line: bytes, number: int) -> None:
        try:
            answered = parse_answered(line)
        except DecodeError as error:
            raise self._foreign(number, f"is no answer of a batch ({error})") from None
        if answered.line is not None:
            what, is_due = f"line {answered.line}", index.mark_answered_line(answered.line, answered.custom_id)
        elif answered.custom_id is not None:
            what, is_due = f"custom_id {answered.custom_id!r:.80}", index.mark_answered_id(answered.custom_id)
        else:
            what, is_due = "nothing", False
        if not is_due:
            raise self._foreign(
                number,
                f"answers {what}, which {index.path} does not hold, or not any more, or which was answered before",
            )

    def _foreign(self, number: int, problem: str) -> ConfigError:
        return ConfigError(
            f"{self.path}, line {number}: {problem}. A batch goes on in its own output only: give -o another name, "
            "remove this line to have its request answered again, or remove the file to begin anew"
        )


def _may_be_answers(file: BinaryIO) -> bool:
    """Whether lines are worth reading: another file may have none, and be read into memory whole."""
    start = file.read(LONGEST_START).lstrip()
    file.seek(0)
    return start.startswith(b"{") or not start.strip(b"\0")


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """All lines but a last one that has no newline."""
    return (line for line in file if line.endswith(b"\n"))


def _sync_folder(folder: Path) -> None:
    """So that a new file's name outlives a crash of the machine, too."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
