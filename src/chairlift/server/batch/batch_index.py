"""The index of a batch file: which lines are requests, and which have no result yet. It needs 140 bytes per line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Final

from chairlift.errors import ConfigError
from chairlift.server.batch.batch_lines import is_blank, read_custom_id, read_lines
from chairlift.system.input_files import open_regular_file

MAX_LINES: Final = 1 << 20
"""The maximum number of lines of a batch file."""

MAX_REPORTED_DUPLICATES: Final = 5
DIGEST_BYTES: Final = 16
UTF16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")


class BatchIndex:
    """The lines of a batch file, by number and by `custom_id`.

    A line without a `custom_id` is not a valid request and is identified by its number.

    Raises:
        ConfigError: the file cannot be read, has more than MAX_LINES lines, or two lines have the same `custom_id`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers: dict[bytes, int] = {}
        self._is_unanswered = bytearray(1)  # Index 0 is not used: lines are counted from 1.
        try:
            self._read()
        except OSError as error:
            raise _unreadable_error(path, error) from None

    @property
    def num_unanswered(self) -> int:
        """The number of lines without a result."""
        return sum(self._is_unanswered)

    def mark_answered_id(self, custom_id: str) -> bool:
        """Mark the line of a `custom_id` as answered; return False if there is no such line without a result."""
        return self.mark_answered_line(self._numbers.get(_key(0, custom_id), 0), custom_id)

    def mark_answered_line(self, number: int, custom_id: str | None) -> bool:
        """Mark a line as answered; return False if it has a result already, or another `custom_id`."""
        if not 0 < number < len(self._is_unanswered) or not self._is_unanswered[number]:
            return False
        if self._numbers.get(_key(number, custom_id)) != number:
            return False
        self._is_unanswered[number] = False
        return True

    def unanswered(self) -> Iterator[tuple[int, bytes]]:
        """Read the lines without a result from the file, with their numbers.

        Raises:
            ConfigError: the file cannot be read, or a line has changed or is missing since the index was built.
        """
        last = self._is_unanswered.rfind(1)
        try:
            with _open(self.path) as file:
                number = 0
                for number, line in read_lines(file):
                    if number > last:
                        return
                    if not self._is_unanswered[number]:
                        continue
                    if self._numbers.get(_key(number, read_custom_id(line))) != number:
                        raise self._change_error(number, "custom_id changed")
                    yield number, line
        except OSError as error:
            raise _unreadable_error(self.path, error) from None
        if number < last:
            raise self._change_error(number, f"the file ends here, but had {last} lines or more: it was cut")

    def _change_error(self, number: int, change: str) -> ConfigError:
        return ConfigError(
            f"{self.path}, line {number}: {change} while the batch ran. All results so far are written: run the same "
            "command again, and do not change the file"
        )

    def _read(self) -> None:
        """Find the line of each key, and mark each line that is not blank as unanswered."""
        duplicates: list[str] = []
        with _open(self.path) as file:
            for number, line in read_lines(file):
                if number == 1 and line.startswith(UTF16_MARKS):
                    raise ConfigError(f"{self.path} is encoded in UTF-16: save it as UTF-8")
                if number > MAX_LINES:
                    raise ConfigError(f"{self.path} has more than {MAX_LINES:,} lines: split it into several batches")
                self._is_unanswered.append(not is_blank(line))
                if is_blank(line):
                    continue
                custom_id = read_custom_id(line)
                earlier = self._numbers.setdefault(_key(number, custom_id), number)
                if earlier != number and len(duplicates) <= MAX_REPORTED_DUPLICATES:
                    duplicates.append(f"line {number}: custom_id {custom_id!r:.80} is that of line {earlier}")
        if duplicates:
            more = "; and more" if len(duplicates) > MAX_REPORTED_DUPLICATES else ""
            raise ConfigError(
                f"{self.path}, {'; '.join(duplicates[:MAX_REPORTED_DUPLICATES])}{more}. Results are matched to "
                "requests by custom_id: give each line a different custom_id"
            )


def _open(path: Path) -> BinaryIO:
    """Open the file, which is read twice, so that a pipe is an error, also in place of the file at the second time."""
    return os.fdopen(open_regular_file(path), "rb")


def _unreadable_error(path: Path, error: OSError) -> ConfigError:
    advice = ", but a batch is read twice: copy it to a file" if error.errno == errno.EINVAL else ""
    return ConfigError(f"{path} cannot be read: {error.strerror}{advice}")


def _key(number: int, custom_id: str | None) -> bytes:
    """The digest of a `custom_id`, or the number of a line without one, which is shorter."""
    if custom_id is None:
        return number.to_bytes(DIGEST_BYTES // 2)
    return blake2b(custom_id.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()
