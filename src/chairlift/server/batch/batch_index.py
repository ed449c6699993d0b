"""The index of a batch file: which lines are requests, and which have no result yet. It needs 17 bytes per line."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift.server.batch.batch_lines import is_blank, read_custom_id, read_lines

MAX_LINES: Final = 1 << 24
"""The maximum number of lines of a batch file, for which the index needs 272 MiB."""

MAX_REPORTED_DUPLICATES: Final = 5
DUPLICATES_PER_PASS: Final = 1000
"""The number of lines with equal keys whose `custom_id`s are compared in one pass over the file."""

UTF16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")


class BatchIndex:
    """The lines of a batch file, by number and by `custom_id`.

    A line without a `custom_id` is not a valid request and is identified by its number.

    Raises:
        ConfigError: the file cannot be read, has more than MAX_LINES lines, or two lines have the same `custom_id`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_unanswered = bytearray(1)  # Index 0 is not used: lines are counted from 1.
        try:
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} is not a regular file, but a batch is read twice: copy it to a file")
            self._keys = self._read_keys()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        self._order: npt.NDArray[np.int64] = np.argsort(self._keys, kind="stable")
        self._check_duplicates()

    @property
    def num_unanswered(self) -> int:
        """The number of lines without a result."""
        return sum(self._is_unanswered)

    def mark_answered_id(self, custom_id: str) -> bool:
        """Mark the line of a `custom_id` as answered; return False if there is no such line without a result."""
        key = np.uint64(_key(custom_id))
        found = int(np.searchsorted(self._keys, key, sorter=self._order))
        if found == len(self._keys):
            return False
        return self.mark_answered_line(int(self._order[found]) + 1, custom_id)

    def mark_answered_line(self, number: int, custom_id: str | None) -> bool:
        """Mark a line as answered; return False if it has a result already, or another `custom_id`."""
        if not 0 < number < len(self._is_unanswered) or not self._is_unanswered[number]:
            return False
        if int(self._keys[number - 1]) != _line_key(number, custom_id):
            return False
        self._is_unanswered[number] = False
        return True

    def unanswered(self) -> Iterator[tuple[int, bytes]]:
        """Read the lines without a result from the file, with their numbers.

        Raises:
            ConfigError: a line has changed since the index was built.
        """
        with self.path.open("rb") as file:
            for number, line in read_lines(file):
                if number >= len(self._is_unanswered) or not self._is_unanswered[number]:
                    continue
                if int(self._keys[number - 1]) != _line_key(number, read_custom_id(line)):
                    raise ConfigError(
                        f"{self.path}, line {number}: custom_id changed while the batch ran. All results so far are "
                        "written: run the same command again, and do not change the file"
                    )
                yield number, line

    def _read_keys(self) -> npt.NDArray[np.uint64]:
        """Compute a key for each line, and mark each line that is not blank as unanswered."""
        keys = array("Q")
        with self.path.open("rb") as file:
            for number, line in read_lines(file):
                if number == 1 and line.startswith(UTF16_MARKS):
                    raise ConfigError(f"{self.path} is encoded in UTF-16: save it as UTF-8")
                if number > MAX_LINES:
                    raise ConfigError(f"{self.path} has more than {MAX_LINES:,} lines: split it into several batches")
                is_request = not is_blank(line)
                keys.append(_line_key(number, read_custom_id(line) if is_request else None))
                self._is_unanswered.append(is_request)
        return np.frombuffer(keys, dtype=np.uint64) if keys else np.empty(0, np.uint64)

    def _check_duplicates(self) -> None:
        in_order = self._keys[self._order]
        equal = np.flatnonzero(in_order[1:] == in_order[:-1]) + 1
        for start in range(0, len(equal), DUPLICATES_PER_PASS):
            places = equal[start : start + DUPLICATES_PER_PASS]
            suspects = {int(self._order[i]) + 1 for i in (*places, *(places - 1))}
            duplicates = self._duplicates(suspects)
            if duplicates:
                more = "; and more" if len(equal) > len(duplicates[:MAX_REPORTED_DUPLICATES]) else ""
                raise ConfigError(
                    f"{self.path}, {'; '.join(duplicates[:MAX_REPORTED_DUPLICATES])}{more}. Results are matched to "
                    "requests by custom_id: give each line a different custom_id"
                )

    def _duplicates(self, suspects: set[int]) -> list[str]:
        """One message for each of these lines whose `custom_id` is that of an earlier line."""
        first: dict[bytes, int] = {}
        duplicates = []
        with self.path.open("rb") as file:
            for number, line in read_lines(file):
                custom_id = read_custom_id(line) if number in suspects else None
                if custom_id is not None and first.setdefault(_digest(custom_id, 32), number) != number:
                    earlier = first[_digest(custom_id, 32)]
                    duplicates.append(f"line {number}: custom_id {custom_id!r:.80} is that of line {earlier}")
        return duplicates


def _line_key(number: int, custom_id: str | None) -> int:
    return number if custom_id is None else _key(custom_id)


def _key(custom_id: str) -> int:
    """64 bits of a hash. The `custom_id`s of lines with equal keys are compared."""
    return int.from_bytes(_digest(custom_id, 8), "little")


def _digest(custom_id: str, size: int) -> bytes:
    return blake2b(custom_id.encode(errors="surrogatepass"), digest_size=size).digest()
