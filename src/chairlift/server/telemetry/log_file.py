"""A log whose lines are dropped, and counted, while they cannot be written: a full disk must not disturb a server."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

from chairlift.system.output_files import unwritable_file_error

logger = logging.getLogger("chairlift")


class LogFile:
    """Appends lines to a file.

    The first line that cannot be written is reported by a warning, and later ones only once a line was written in
    between; then another warning says how many lines are missing. Nothing is buffered, so that no line is written late
    or in part when there is space again.

    Args:
        field: the option that names the file, for the messages.
        path: None is standard error.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, field: str, path: Path | None) -> None:
        self._name = "standard error" if path is None else f"{field}={path}"
        self._is_closed = False
        self._is_torn = False
        self.num_lost = 0
        """Lines that could not be written since the last one that could."""
        try:
            self._file = _standard_error() if path is None else io.FileIO(path, "a")
        except OSError as error:
            assert path is not None
            raise unwritable_file_error(field, path, error) from None

    def write(self, line: str) -> None:
        """Append a line, which has no line end; never raises because of the file."""
        if self._file is None or self._is_closed:
            return
        data = line.encode(errors="backslashreplace") + b"\n"
        try:
            self._write_all(self._file, b"\n" + data if self._is_torn else data)
        except OSError as error:
            self._lose_line(error)
        else:
            self._is_torn = False
            self._report_lost_lines("it can be written again, and")

    def close(self) -> None:
        """Close the file; never raises because of it."""
        self._is_closed = True
        self._report_lost_lines("in the end")
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                logger.warning("%s: cannot be closed (%s)", self._name, error.strerror or error)

    def _write_all(self, file: io.FileIO, data: bytes) -> None:
        num_written = 0
        while num_written < len(data):
            count = file.write(data[num_written:])
            if not count:
                raise BlockingIOError(0, "it does not take a whole line")
            num_written += count
            self._is_torn = True

    def _lose_line(self, error: OSError) -> None:
        if self.num_lost == 0:
            reason = error.strerror or error
            logger.warning("%s: cannot be written (%s); lines are dropped until it can be", self._name, reason)
        self.num_lost += 1

    def _report_lost_lines(self, when: str) -> None:
        if self.num_lost:
            logger.warning("%s: %s %d lines were lost", self._name, when, self.num_lost)
            self.num_lost = 0


def _standard_error() -> io.FileIO | None:
    """Standard error without a buffer; None if the process has none."""
    try:
        return io.FileIO(sys.stderr.fileno(), "w", closefd=False)
    except (AttributeError, OSError, ValueError):
        return None
