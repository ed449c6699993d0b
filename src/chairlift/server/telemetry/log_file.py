"""A log file that drops and counts lines while they cannot be written, so that a full disk does not stop the server."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

from chairlift.system.output_files import unwritable_file_error

logger = logging.getLogger("chairlift")


class LogFile:
    """Appends lines to a file, without a buffer.

    A warning reports the first line that cannot be written. Another warning reports the number of lost lines when a
    line can be written again, or when the file is closed.

    Args:
        field: the option that sets the file, for messages.
        path: the file; None is standard error.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, field: str, path: Path | None) -> None:
        self._name = "standard error" if path is None else f"{field}={path}"
        self._is_closed = False
        self._is_partial = False  # The last line was written in part.
        self.num_lost = 0
        """The number of lines that were lost since the last written line."""
        try:
            self._file = _standard_error() if path is None else io.FileIO(path, "a")
        except OSError as error:
            assert path is not None
            raise unwritable_file_error(field, path, error) from None

    def write(self, line: str) -> None:
        """Append a line and a newline. Errors of the file are logged, not raised."""
        if self._file is None or self._is_closed:
            return
        data = line.encode(errors="backslashreplace") + b"\n"
        try:
            self._write_all(self._file, b"\n" + data if self._is_partial else data)
        except OSError as error:
            self._lose_line(error)
        else:
            self._is_partial = False
            self._report_lost_lines("can be written again")

    def close(self) -> None:
        """Close the file. Errors of the file are logged, not raised."""
        self._is_closed = True
        self._report_lost_lines("is closed")
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
                raise BlockingIOError(0, "only a part of a line could be written")
            num_written += count
            self._is_partial = True

    def _lose_line(self, error: OSError) -> None:
        if self.num_lost == 0:
            reason = error.strerror or error
            logger.warning("%s: cannot be written (%s); lines are dropped until it can be written", self._name, reason)
        self.num_lost += 1

    def _report_lost_lines(self, when: str) -> None:
        if self.num_lost:
            logger.warning("%s: %s; %d lines were lost", self._name, when, self.num_lost)
            self.num_lost = 0


def _standard_error() -> io.FileIO | None:
    """Standard error without a buffer; None if the process has no standard error."""
    try:
        return io.FileIO(sys.stderr.fileno(), "w", closefd=False)
    except (AttributeError, OSError, ValueError):
        return None
