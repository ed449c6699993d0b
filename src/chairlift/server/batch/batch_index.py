"""The index of a batch file: which lines are requests, and which have no result yet."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from chairlift.errors import ConfigError
from chairlift.server.batch.batch_lines import is_blank, read_custom_id, read_lines
from chairlift.system.input_files import open_regular_file

MAX_LINES: Final = 1 << 20
"""The maximum number of lines of a batch file."""

UTF16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")
DONE, WITH_ID, WITHOUT_ID = range(3)
"""The states of a line: blank or answered; unanswered with a `custom_id`; and unanswered without one, which is an
invalid request."""


class BatchIndex:
    """The lines of a batch file, by number and by `custom_id`. The file stays open, because it is read twice.

    Raises:
        ConfigError: the file cannot be read, has more than MAX_LINES lines, or two lines have the same `custom_id`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers: dict[str, int] = {}
        self._states = bytearray(1)  # Index 0 is not used: lines are counted from 1.
        try:
            self._file = os.fdopen(open_regular_file(path), "rb")
            self._read()
        except OSError as error:
            advice = ", but a batch is read twice: copy it to a file" if error.errno == errno.EINVAL else ""
            raise ConfigError(f"{path} cannot be read: {error.strerror}{advice}") from None

    @property
    def num_unanswered(self) -> int:
        """The number of lines without a result."""
        return len(self._states) - self._states.count(DONE)

    def mark_answered(self, custom_id: str | None, number: int | None = None) -> bool:
        """Mark the line of a `custom_id` as answered; return False if there is no such line without a result.

        Args:
            number: the number of the line, which a line without a `custom_id` has instead.
        """
        known = number or 0 if custom_id is None else self._numbers.get(custom_id, 0)
        state = WITHOUT_ID if custom_id is None else WITH_ID
        if number not in (None, known) or not 0 < known < len(self._states) or self._states[known] != state:
            return False
        self._states[known] = DONE
        return True

    def unanswered(self) -> Iterator[tuple[int, bytes]]:
        """Read the lines without a result from the file, with their numbers. Those that were appended since the index
        was built belong to the next run."""
        with self._file:
            self._file.seek(0)
            for number, line in read_lines(self._file):
                if number >= len(self._states):
                    return
                if self._states[number] != DONE:
                    yield number, line

    def _read(self) -> None:
        """Find the line of each `custom_id`, and the state of each line."""
        for number, line in read_lines(self._file):
            if number == 1 and line.startswith(UTF16_MARKS):
                raise ConfigError(f"{self.path} is encoded in UTF-16: save it as UTF-8")
            if number > MAX_LINES:
                raise ConfigError(f"{self.path} has more than {MAX_LINES:,} lines: split it into several batches")
            custom_id = read_custom_id(line)
            self._states.append(DONE if is_blank(line) else WITHOUT_ID if custom_id is None else WITH_ID)
            if custom_id is not None and (earlier := self._numbers.setdefault(custom_id, number)) != number:
                raise ConfigError(
                    f"{self.path}, line {number}: custom_id {custom_id!r:.80} is that of line {earlier}. Results are "
                    "matched to requests by custom_id: give each line a different custom_id"
                )
